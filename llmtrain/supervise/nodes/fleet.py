"""The agents of one attempt: one per node, started over the node's transport, all speaking into one inbox."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from llmtrain.agent import messages
from llmtrain.backends.base import Backend, DistantBackend, Node
from llmtrain.errors import LlmtrainError
from llmtrain.run.layout import RunDir
from llmtrain.supervise.nodes.mirror import Mirror
from llmtrain.transport.base import Channel, Completed, Transport, TransportError
from llmtrain.transport.parallel import in_parallel

Key = TypeVar("Key")

SWEEP_SECONDS = 30.0
"""For a sweep's own work, beyond the grace it is given."""


class Fleet:
    """Channels to the agents of one attempt."""

    def __init__(
        self, run: RunDir, attempt: int, backend: Backend, nodes: Sequence[Node], *, standby: bool = False
    ) -> None:
        self.run, self.attempt, self.backend, self.nodes = run, attempt, backend, tuple(nodes)
        # Before an attempt begins, nothing of its folder exists.
        self._log = run.attempt(attempt - 1).standby_agent_log if standby else run.attempt(attempt).agent_log
        self._channels: dict[int, Channel] = {}
        self._transports: dict[int, Transport] = {}
        self._inbox: queue.SimpleQueue[tuple[int, messages.Message | None]] = queue.SimpleQueue()
        self._mirror: Mirror | None = None
        if isinstance(backend, DistantBackend) and backend.is_distant:
            pythons = [backend.agent_python(node) for node in nodes]
            self._mirror = Mirror(run, run.attempt(attempt), pythons)

    def open(self) -> dict[int, str]:
        """Start all agents, at once; node rank -> error for those that could not be reached."""
        work = {index: partial(self._open_one, index) for index in range(len(self.nodes))}
        failed = _unreached(in_parallel(work, seconds=None)[1])
        if self._mirror is not None:
            self._mirror.follow()
        return failed

    def receive(self, timeout: float) -> Iterator[tuple[int, messages.Message | None]]:
        """(node rank, message) of what has arrived, waiting for the first one; None is a channel's end."""
        try:
            yield self._inbox.get(timeout=timeout)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def send(self, node: int, message: messages.Message) -> None:
        """Say something to one agent; what does not arrive shows as its silence."""
        channel = self._channels.get(node)
        if channel is not None:
            channel.send(messages.encode(message))

    def send_all(self, message: messages.Message) -> None:
        """Say something to all agents."""
        for node in self._channels:
            self.send(node, message)

    def exit_code(self, node: int) -> int | None:
        """Exit code of a node's agent, where it is known."""
        channel = self._channels.get(node)
        return None if channel is None else channel.exit_code()

    def cut(self) -> None:
        """End all channels; an agent that still lives notices and makes its ranks leave."""
        if self._mirror is not None:
            self._mirror.finish()
        for channel in self._channels.values():
            channel.kill()
        for transport in self._transports.values():
            transport.close()

    def _open_one(self, index: int) -> None:
        node = self.nodes[index]
        transport = self._transports[index] = self.backend.transport(node)
        if self._mirror is not None:
            self._mirror.push(index, transport)
        command = [self.backend.agent_python(node), "-m", "llmtrain.agent"]
        options = ["--run-dir", str(self.run.path), "--attempt", str(self.attempt), "--node", str(index)]
        self._channels[index] = transport.open(
            [*command, *options],
            on_line=partial(self._on_line, index),
            stderr=self._log(index),
            environment={},
        )

    def _on_line(self, index: int, line: bytes | None) -> None:
        if line is None:
            self._inbox.put((index, None))
        elif (message := messages.decode(line)) is not None:
            if self._mirror is not None and isinstance(message, messages.Relayed):
                self._mirror.take(index, message.line)
            self._inbox.put((index, message))


def sweep_nodes(
    run: RunDir, backend: Backend, nodes: Sequence[Node], *, older_than: int, grace: float
) -> tuple[dict[str, str], dict[str, str]]:
    """End what earlier attempts left on the nodes, after up to `grace` seconds in which it may leave by
    itself. Returns node name -> what was swept, and node name -> why the node could not be reached."""

    def sweep_one(node: Node) -> str:
        transport = backend.transport(node)
        try:
            argv = [backend.agent_python(node), "-m", "llmtrain.agent", "sweep", "--run-dir", str(run.path)]
            limits = ["--older-than", str(older_than), "--grace", str(grace)]
            return _swept(transport.run([*argv, *limits], timeout=grace + SWEEP_SECONDS))
        finally:
            transport.close()

    unique = {node.address: node for node in nodes}.values()
    words, failed = in_parallel({node.name: partial(sweep_one, node) for node in unique}, seconds=None)
    swept = {name: word for name, word in words.items() if word}
    return swept, {name: f"could not be swept: {why}" for name, why in _unreached(failed).items()}


def wait_until(done: Callable[[], bool], seconds: float, pump: Callable[[float], None]) -> bool:
    """Call `pump(timeout)` until `done()` or the time is over; whether it was done."""
    deadline = time.monotonic() + seconds
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        pump(min(left, 0.2))
    return True


def _unreached(failed: Mapping[Key, LlmtrainError]) -> dict[Key, str]:
    """Why nodes could not be reached. Raises what is wrong with no node, but with the run."""
    for error in failed.values():
        if not isinstance(error, TransportError):
            raise error
    return {key: error.text() for key, error in failed.items()}


def _swept(done: Completed) -> str:
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return f"could not be swept: {done.stderr.decode('utf-8', 'replace').strip()[-500:]}"
    parts = []
    if report["left_by_themselves"]:
        parts.append(f"{report['left_by_themselves']} processes of an earlier attempt left by themselves")
    if report["killed"]:
        parts.append(f"killed leftovers {report['killed']}")
    if report["remaining"]:
        parts.append(f"processes that cannot be killed: {report['remaining']}")
    return "; ".join(parts)
