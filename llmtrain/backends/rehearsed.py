"""Several nodes on this machine that can be lost on purpose, and come back: for rehearsals.

While `RUN_DIR/down/NAME` exists, nothing gets into a node, as after a power cut; who makes the file also
kills what runs there. All else is the local backend: real agents, scripts and processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from llmtrain.backends.base import Node
from llmtrain.backends.local import LOOPBACK, LocalBackend
from llmtrain.backends.preflight import PreflightError
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import JobSpec
from llmtrain.errors import Problem
from llmtrain.run.layout import RunDir
from llmtrain.transport.base import Channel, Completed, OnLine, Transport, TransportError
from llmtrain.transport.local import LocalTransport


class RehearsedNodes(LocalBackend):
    """Nodes n1, n2, ... of this machine."""

    def __init__(self, cluster: ClusterProfile, run: RunDir) -> None:
        super().__init__(cluster)
        self._count, self._down = cluster.nodes, run.path / "down"

    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        """Those that are up; raises PreflightError when they are too few."""
        names = [f"n{index}" for index in range(1, self._count + 1)]
        up = self.look_at(names, spec, run, seconds=0.0)
        needed = spec.cluster.nodes - spec.cluster.spares if fewest is None else fewest
        if len(up) < needed:
            raise PreflightError([Problem("", f"{len(up)} nodes are up, {needed} are needed")])
        return up

    def look_at(self, names: Sequence[str], spec: JobSpec, run: RunDir, *, seconds: float) -> Sequence[Node]:
        """Those of the named nodes that are up."""
        # Each with an address of its own: one address is one machine, whose leftovers are swept once.
        return [
            Node(name=name, address=f"{LOOPBACK.rpartition('.')[0]}.{name[1:]}")
            for name in names
            if not (self._down / name).exists()
        ]

    def transport(self, node: Node) -> Transport:
        """Child processes, while the node is up."""
        return RehearsedTransport(self._down / node.name)


class RehearsedChannel:
    """A channel over which nobody learns how the process on a lost node ended."""

    def __init__(self, channel: Channel, down: Path) -> None:
        self._channel, self._down = channel, down
        self.send, self.finish, self.kill = channel.send, channel.finish, channel.kill

    def exit_code(self) -> int | None:
        """Of the process; None once the node is lost."""
        return None if self._down.exists() else self._channel.exit_code()


class RehearsedTransport:
    """Child processes, while a file does not exist."""

    def __init__(self, down: Path) -> None:
        self._here, self._down = LocalTransport(), down
        self.put, self.get, self.close = self._here.put, self._here.get, self._here.close

    def run(self, argv: Sequence[str], *, timeout: float, stdin: bytes = b"") -> Completed:
        """Raises TransportError while the node is down."""
        self._refuse()
        return self._here.run(argv, timeout=timeout, stdin=stdin)

    def open(
        self, argv: Sequence[str], *, on_line: OnLine, stderr: Path, environment: Mapping[str, str]
    ) -> Channel:
        """Raises TransportError while the node is down."""
        self._refuse()
        channel = self._here.open(argv, on_line=on_line, stderr=stderr, environment=environment)
        return RehearsedChannel(channel, self._down)

    def _refuse(self) -> None:
        if self._down.exists():
            raise TransportError(f"{self._down.name}: no answer")


def lose_node(run: RunDir, name: str, place: int | None) -> None:
    """Power off a node, which has this place in the newest attempt; None: it is not part of it."""
    down = run.path / "down"
    down.mkdir(exist_ok=True)
    (down / name).touch()
    for process in psutil.process_iter() if place is not None else ():
        try:
            argv = process.cmdline()
            if "llmtrain.agent" in argv and str(run.path) in argv and argv[-2:] == ["--node", str(place)]:
                for each in [process, *process.children(recursive=True)]:
                    each.kill()
        except psutil.Error:
            continue


def return_node(run: RunDir, name: str) -> None:
    """Let a node be reached again."""
    (run.path / "down" / name).unlink(missing_ok=True)
