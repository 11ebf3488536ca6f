"""Nodes that can be lost on purpose, and come back, for rehearsals: stand-ins on this machine, or real hosts.

While `RUN_DIR/down/NAME` exists, nothing gets into a node, as after a power cut; who makes the file also
kills what runs there. All else is the backend itself: real agents, scripts and processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from llmtrain.backends.base import Backend, Node
from llmtrain.backends.local import LOOPBACK, LocalBackend
from llmtrain.backends.preflight import PreflightError
from llmtrain.backends.ssh import SshBackend
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import JobSpec
from llmtrain.errors import Problem
from llmtrain.run.layout import RunDir
from llmtrain.transport.base import Channel, Completed, OnLine, Transport, TransportError

KILL_SECONDS = 30.0
"""For a node to kill what runs on it."""


class RehearsedNodes(LocalBackend):
    """Nodes n1, n2, ... of this machine."""

    is_rehearsed: bool = True

    def __init__(self, cluster: ClusterProfile, run: RunDir) -> None:
        super().__init__(cluster)
        self._count, self._down = cluster.nodes, _down(run)

    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        """Those that are up; raises PreflightError when they are too few."""
        names = [f"n{index}" for index in range(1, self._count + 1)]
        return _enough(self.look_at(names, spec, run, seconds=0.0), spec, fewest)

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
        return RehearsedTransport(super().transport(node), self._down / node.name)


class RehearsedHosts(SshBackend):
    """The profile's hosts."""

    is_rehearsed: bool = True

    def __init__(self, cluster: ClusterProfile, run: RunDir) -> None:
        super().__init__(cluster)
        self._down = _down(run)

    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        """Those that are fit and up; raises PreflightError when they are too few."""
        found = super().nodes(spec, run, fewest=fewest)
        return _enough([node for node in found if not (self._down / node.name).exists()], spec, fewest)

    def look_at(self, names: Sequence[str], spec: JobSpec, run: RunDir, *, seconds: float) -> Sequence[Node]:
        """Those of the named hosts that are fit and up."""
        return super().look_at(self._up(names), spec, run, seconds=seconds)

    def preflight(self, names: Sequence[str], run: RunDir, *, seconds: float) -> Mapping[str, str]:
        """What is wrong with those that are up."""
        return super().preflight(self._up(names), run, seconds=seconds)

    def transport(self, node: Node) -> Transport:
        """A connection to the node, while it is up."""
        return RehearsedTransport(super().transport(node), self._down / node.name)

    def _up(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if not (self._down / name).exists()]


class RehearsedChannel:
    """A channel over which nobody learns how the process on a lost node ended."""

    def __init__(self, channel: Channel, down: Path) -> None:
        self._channel, self._down = channel, down
        self.send, self.finish, self.kill = channel.send, channel.finish, channel.kill

    def exit_code(self) -> int | None:
        """Of the process; None once the node is lost."""
        return None if self._down.exists() else self._channel.exit_code()


class RehearsedTransport:
    """A way into a node, while a file does not exist."""

    def __init__(self, way: Transport, down: Path) -> None:
        self._way, self._down = way, down
        self.put, self.get, self.close = way.put, way.get, way.close

    def run(self, argv: Sequence[str], *, timeout: float, stdin: bytes = b"") -> Completed:
        """Raises TransportError while the node is down."""
        self._refuse()
        return self._way.run(argv, timeout=timeout, stdin=stdin)

    def open(
        self, argv: Sequence[str], *, on_line: OnLine, stderr: Path, environment: Mapping[str, str]
    ) -> Channel:
        """Raises TransportError while the node is down."""
        self._refuse()
        channel = self._way.open(argv, on_line=on_line, stderr=stderr, environment=environment)
        return RehearsedChannel(channel, self._down)

    def _refuse(self) -> None:
        if self._down.exists():
            raise TransportError(f"{self._down.name}: no answer")


def rehearsed(cluster: ClusterProfile, run: RunDir) -> Backend:
    """The backend of a run whose nodes are lost on purpose."""
    return RehearsedHosts(cluster, run) if cluster.backend.kind == "ssh" else RehearsedNodes(cluster, run)


def lose_stand_in(run: RunDir, name: str, place: int | None) -> None:
    """Power off a node of this machine, which has this place in the newest attempt; None: it is not part of
    it."""
    _mark(run, name)
    for process in psutil.process_iter() if place is not None else ():
        try:
            argv = process.cmdline()
            if "llmtrain.agent" in argv and str(run.path) in argv and argv[-2:] == ["--node", str(place)]:
                for each in [process, *process.children(recursive=True)]:
                    each.kill()
        except psutil.Error:
            continue


def lose_host(run: RunDir, backend: Backend, name: str) -> None:
    """Kill all that a run has on a host, and let nothing more into it. Raises TransportError."""
    node = Node(name=name, address="")
    way = backend.transport(node)
    try:
        _mark(run, name)
        sweep = [backend.agent_python(node), "-m", "llmtrain.agent", "sweep", "--run-dir", str(run.path)]
        way.run([*sweep, "--older-than", str(1 + max(run.attempt_numbers()))], timeout=KILL_SECONDS)
    finally:
        way.close()


def return_node(run: RunDir, name: str) -> None:
    """Let a node be reached again."""
    (_down(run) / name).unlink(missing_ok=True)


def _down(run: RunDir) -> Path:
    return run.path / "down"


def _mark(run: RunDir, name: str) -> None:
    _down(run).mkdir(exist_ok=True)
    (_down(run) / name).touch()


def _enough(up: Sequence[Node], spec: JobSpec, fewest: int | None) -> Sequence[Node]:
    needed = spec.cluster.nodes - spec.cluster.spares if fewest is None else fewest
    if len(up) < needed:
        raise PreflightError([Problem("", f"{len(up)} nodes are up, {needed} are needed")])
    return up
