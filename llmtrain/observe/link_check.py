"""Runs the test of nodes and links: one process a node, pairs in parallel, no wait without a limit."""

from __future__ import annotations

import json
import queue
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain.backends.base import Backend, Node
from llmtrain.backends.suspects import (
    Measurements,
    Pair,
    Suspicion,
    best_pairs,
    rounds,
    second_opinions,
    suspicions,
)
from llmtrain.transport.base import Channel, Transport, TransportError
from llmtrain.transport.parallel import in_parallel

MODULE = "llmtrain.engine.linktest"
START_SECONDS = 120.0
"""For a node to load torch, all of them at once, perhaps from a slow shared folder."""
ANSWER_SECONDS = 60.0
MOST_ROUNDS, OPINIONS, MOST_LOOKS = 7, 2, 3
PRODUCT_SECONDS, PAIR_SECONDS = 1.0, 0.5
BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


class LinkCheck:
    """The test over some nodes; `run` once."""

    def __init__(self, backend: Backend, nodes: Sequence[Node]) -> None:
        self._backend, self._nodes = backend, {node.name: node for node in nodes}
        self._channels: dict[str, Channel] = {}
        self._transports: list[Transport] = []
        self._inbox: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self._products: dict[str, list[float]] = {}
        self._pairs: dict[Pair, float] = {}
        self._errors: dict[Pair, str] = {}
        self._device = "cpu"
        self._ended: dict[str, str] = {}
        """Nodes whose test has ended or fell silent on the way, and how."""

    def run(self) -> tuple[Measurements, list[Suspicion], dict[str, str]]:
        """Measure all, and suspects once more: (rates, who is slow, node -> why its test did not start)."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmtrain-doctor-")))
            stack.callback(self._close)
            _, failed = self._for_all(partial(self._start, folder), list(self._nodes), START_SECONDS)
            names = [name for name in self._nodes if name not in failed]
            self._ended.clear()
            self._measure_products(names)
            for pairing in rounds(names, MOST_ROUNDS):
                self._measure_pairs(pairing)
            for _ in range(MOST_LOOKS):
                if not self._ask_again(names):
                    break
        found = self._found()
        unfit = {name: str(error) for name, error in failed.items()} | self._ended
        return found, suspicions(found), unfit

    def _found(self) -> Measurements:
        """Without the pairs of nodes whose test has ended: that is no link's fault."""
        pairs = {pair: rate for pair, rate in self._pairs.items() if not self._ended.keys() & set(pair)}
        return Measurements(device=self._device, products=self._products, pairs=pairs, errors=self._errors)

    def _ask_again(self, names: Sequence[str]) -> bool:
        """A further opinion on everybody suspect, against nodes that are not: the better result counts, since
        other work can only slow a node down. Whether anybody was suspect."""
        found = self._found()
        suspects = list(dict.fromkeys(name for each in suspicions(found) for name in each.nodes))
        best = best_pairs(found)
        trusted = sorted(
            (name for name in names if name not in (*suspects, *self._ended)),
            key=lambda name: -best.get(name, 0),
        )
        if not suspects:
            return False
        # One at a time: what slows them down together is left out.
        for name in suspects:
            self._measure_products([name])
        for pairing in second_opinions(suspects, trusted, OPINIONS):
            for pair in pairing:
                self._measure_pairs([pair])
        for each in suspicions(self._found()):
            if len(each.nodes) == 2:
                self._measure_pairs([(each.nodes[0], each.nodes[1])])
        return True

    # ---- measurements
    def _measure_products(self, names: Sequence[str]) -> None:
        request = {"do": "product", "seconds": PRODUCT_SECONDS}
        answers, _ = self._for_all(lambda name: self._ask(name, request), names)
        for name, answer in answers.items():
            if "flops" in answer:
                self._device = answer["device"]
                known = self._products.get(name, [0.0] * len(answer["flops"]))
                self._products[name] = [max(pair) for pair in zip(known, answer["flops"], strict=True)]

    def _measure_pairs(self, pairs: Sequence[Pair]) -> None:
        answers, failed = self._for_all(self._pair, pairs)
        errors = {pair: str(error) for pair, error in failed.items()}
        for pair in pairs:
            known = pair if pair in self._pairs else pair[::-1]
            key = known if known in self._pairs else pair
            self._pairs[key] = max(self._pairs.get(key, 0.0), answers.get(pair, 0.0))
            if pair in errors:
                self._errors[key] = errors[pair]

    def _pair(self, pair: Pair) -> float:
        """Bandwidth between two nodes, bytes/s. Raises TransportError."""
        first, second = pair
        port = self._ask(first, {"do": "listen"})["port"]
        request = {
            "do": "reduce",
            "address": self._nodes[first].address,
            "port": port,
            "bytes": BYTES[self._device],
            "seconds": PAIR_SECONDS,
        }
        self._say(first, {**request, "rank": 0})
        self._say(second, {**request, "rank": 1})
        # The second one's error first: it is the one that connects.
        answers = [self._hear(name, ANSWER_SECONDS) for name in (second, first)]
        for name, answer in zip((second, first), answers, strict=True):
            if "error" in answer:
                raise TransportError(f"{name}: {answer['error']}")
        return float(min(answer["bandwidth"] for answer in answers))

    # ---- talk
    def _start(self, folder: Path, name: str) -> None:
        node, inbox = self._nodes[name], self._inbox.setdefault(name, queue.SimpleQueue())
        transport = self._backend.transport(node)
        self._transports.append(transport)
        log = folder / f"{len(self._inbox)}.log"
        self._channels[name] = transport.open(
            [self._backend.agent_python(node), "-m", MODULE],
            on_line=inbox.put,
            stderr=log,
            environment=node.environment,
        )
        try:
            self._hear(name, START_SECONDS)
        except TransportError as error:
            lines = (
                log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
            )
            raise TransportError(f"the test does not start: {lines[-1] if lines else error}") from error

    def _ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        self._say(name, request)
        answer = self._hear(name, ANSWER_SECONDS)
        if "error" in answer:
            raise TransportError(f"{name}: {answer['error']}")
        return answer

    def _say(self, name: str, request: Mapping[str, Any]) -> None:
        if not self._channels[name].send(json.dumps(request).encode("ascii")):
            raise TransportError(f"{name}: its test has ended")

    def _hear(self, name: str, seconds: float) -> dict[str, Any]:
        """The next answer; whatever else a node says is skipped."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._inbox[name].get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                self._ended[name] = "its test of nodes and links has ended by itself"
                raise TransportError(f"{name}: its test has ended")
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if isinstance(answer, dict):
                return answer
        # What it says later would be taken for the answer to another question.
        self._channels[name].kill()
        self._ended[name] = f"its test of nodes and links did not answer within {seconds:g} s"
        raise TransportError(f"{name}: no answer within {seconds:g} s")

    def _for_all(self, work: Any, keys: Sequence[Any], seconds: float = 3 * ANSWER_SECONDS) -> Any:
        return in_parallel({key: partial(work, key) for key in keys}, seconds=seconds + 10.0)

    def _close(self) -> None:
        for channel in self._channels.values():
            channel.kill()
        for transport in self._transports:
            transport.close()
