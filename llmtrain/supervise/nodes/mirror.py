"""The run's folder here, and on nodes that do not share it: ranks' input goes there, what they say comes.

Events come as they are relayed; logs and stack dumps every few seconds, and once more before the channels are
cut. Checkpoints stay where they are written, on the nodes.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from llmtrain.agent.tails import MOST_BYTES
from llmtrain.errors import LlmtrainError
from llmtrain.events.event import decode_line
from llmtrain.run.data_file import read_data_file
from llmtrain.run.layout import AttemptDir, RunDir
from llmtrain.transport.base import Transport, TransportError

PULL_SECONDS = 5.0
TAILS_SECONDS, FINISH_SECONDS = 30.0, 10.0
CORPUS_LIMIT = 256 << 20
"""Bytes of prepared corpora that are sent to nodes; larger ones have to lie there."""


class Mirror:
    """Both folders of one attempt; `pythons` have llmtrain, one on each node."""

    def __init__(self, run: RunDir, attempt: AttemptDir, pythons: Sequence[str]) -> None:
        self._run, self._attempt, self._pythons = run, attempt, pythons
        self._transports: dict[int, Transport] = {}
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def push(self, node: int, transport: Transport) -> None:
        """Bring a node what its agent and ranks read. Raises TransportError."""
        for file in self._files():
            transport.put(file, file.read_bytes(), mode=file.stat().st_mode & 0o777)
        self._push_corpora(transport)
        self._transports[node] = transport

    def take(self, node: int, line: str) -> None:
        """Keep an event that was relayed; what cannot be written is folded all the same."""
        event = decode_line(line.encode())
        if event is None or event.attempt != self._attempt.number:
            return
        is_rank = event.source == "rank" and event.rank is not None
        path = self._attempt.rank_events(event.rank or 0) if is_rank else self._attempt.agent_events(node)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def follow(self) -> None:
        """Begin to fetch logs and stacks."""
        threading.Thread(target=self._follow, name="mirror", daemon=True).start()

    def finish(self) -> None:
        """Fetch what is left of them; nodes that do not answer are not waited for."""
        self._is_over.set()
        last = threading.Thread(target=self._pull, name="mirror-last", daemon=True)
        last.start()
        last.join(FINISH_SECONDS)

    # ---- there
    def _files(self) -> Iterator[Path]:
        run = self._run
        for path in (run.plan_json, run.data_json, run.allowance_json, self._attempt.attempt_json):
            if path.exists():
                yield path
        yield from sorted(path for path in run.scripts.iterdir() if path.is_file())
        yield run.job_json

    def _push_corpora(self, transport: Transport) -> None:
        for place in read_data_file(self._run.data_json).corpora:
            folder = Path(place.folder)
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            files += [Path(place.order)] if place.order else []
            size = sum(path.stat().st_size for path in files)
            if size > CORPUS_LIMIT:
                raise TransportError(
                    f"the corpus {folder} holds {size >> 20} MiB, more than is sent to nodes",
                    hint="use a corpus that fits, or a storage.path that this machine sees too",
                )
            done = folder / f".{place.digest[:16]}-complete"
            if transport.run(["test", "-e", str(done)], timeout=TAILS_SECONDS).exit_code:
                for path in files:
                    transport.put(path, path.read_bytes())
                transport.put(done, b"")

    # ---- back
    def _follow(self) -> None:
        while not self._is_over.wait(PULL_SECONDS):
            self._pull()

    def _pull(self) -> None:
        with self._lock:
            for node, transport in list(self._transports.items()):
                with suppress(LlmtrainError, OSError):
                    while self._pull_one(node, transport):
                        pass

    def _pull_one(self, node: int, transport: Transport) -> bool:
        """Whether there may be more at once."""
        command = [self._pythons[node], "-m", "llmtrain.agent.tails", str(self._attempt.path)]
        known = json.dumps(self._known).encode("ascii")
        done = transport.run(command, timeout=TAILS_SECONDS, stdin=known)
        if done.exit_code:
            sys.stderr.write(f"logs of node {node}: {done.stderr.decode('utf-8', 'replace')[-500:]}\n")
            return False
        new = {name: base64.b64decode(text) for name, text in json.loads(done.stdout).items()}
        for name, data in new.items():
            path = self._attempt.path / name
            if self._attempt.path.resolve() not in path.resolve().parents:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
            self._known[name] = self._known.get(name, 0) + len(data)
        return any(len(data) == MOST_BYTES for data in new.values())
