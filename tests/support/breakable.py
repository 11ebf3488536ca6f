"""Several nodes on this machine that can be broken: real agents, scripts and processes, no network.

A node is an address of the loopback device. While `RUN_DIR/down/NAME` exists, nothing gets into it;
`break_node` also kills everything of it, as a power cut does. `python -m tests.support.breakable RUN_DIR
QUARANTINE STEP_UP` is the supervisor of a run over such nodes, with these limits in seconds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from llmtrain import __version__
from llmtrain.backends import registry
from llmtrain.backends.base import Node
from llmtrain.backends.local import LocalBackend
from llmtrain.backends.preflight import PreflightError
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import JobSpec, resolve
from llmtrain.errors import Problem
from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.render.scripts import render
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.supervise import __main__ as supervisor
from llmtrain.supervise.create import create_run
from llmtrain.transport.base import Channel, Completed, OnLine, TransportError
from llmtrain.transport.local import LocalTransport
from tests.support import stand_in

PROFILE = """\
name: several
nodes: {nodes}
spares: {spares}
gpus_per_node: 1
accelerator: cpu
intra_node: {{kind: shared-memory}}
inter_node: {{data: {{kind: tcp}}, control: {{kind: tcp}}}}
storage: {{path: {storage}, bandwidth: 1 GB/s}}
backend: {{kind: local}}
"""


def several_nodes(folder: Path, *overrides: str, nodes: int, spares: int = 0) -> JobSpec:
    """The tiny recipe over nodes of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "several.yaml"
    profile.write_text(PROFILE.format(nodes=nodes, spares=spares, storage=folder / "runs"))
    return resolve("tiny", str(profile), overrides)


def make_run(path: Path, spec: JobSpec, **behaviour: object) -> RunDir:
    """A run of the stand-in."""
    plan = make_plan(spec)
    run = RunDir(path)
    job = JobFile(run_id=run.run_id, version=__version__, spec=spec, layout=plan.plans[0].layout)
    create_run(run, render(job, plan_document(plan), run, python=sys.executable))
    stand_in.install(run, **behaviour)
    (run.path / "down").mkdir()
    return run


def supervise(run: RunDir, quarantine: float = 60.0, step_up: float = 60.0) -> subprocess.Popen[bytes]:
    """Start the supervisor, with so many seconds of quarantine, and between looks for nodes and steps up."""
    with run.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.breakable", str(run.path), str(quarantine), str(step_up)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )


def break_node(run: RunDir, name: str) -> None:
    """Power off a node of the newest attempt."""
    (run.path / "down" / name).touch()
    attempt = read_record(run).attempts[-1]
    if name not in attempt.nodes:
        return
    index = str(attempt.nodes.index(name))
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            if "llmtrain.agent" in argv and str(run.path) in argv and argv[-2:] == ["--node", index]:
                for each in [process, *process.children(recursive=True)]:
                    each.kill()
        except psutil.Error:
            continue


def mend_node(run: RunDir, name: str) -> None:
    """Let a node be reached again."""
    (run.path / "down" / name).unlink()


class BreakableNodes(LocalBackend):
    """Nodes n1, n2, ... of this machine, as a backend whose nodes come back one by one."""

    def __init__(self, cluster: ClusterProfile) -> None:
        super().__init__(cluster)
        self._count = cluster.nodes

    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        names = [f"n{index}" for index in range(1, self._count + 1)]
        up = self.look_at(names, spec, run, seconds=0.0)
        needed = spec.cluster.nodes - spec.cluster.spares if fewest is None else fewest
        if len(up) < needed:
            raise PreflightError([Problem("", f"{len(up)} nodes are up, {needed} are needed")])
        return up

    def look_at(self, names: Sequence[str], spec: JobSpec, run: RunDir, *, seconds: float) -> Sequence[Node]:
        return [
            Node(name=name, address=f"127.0.0.{name[1:]}")
            for name in names
            if not (run.path / "down" / name).exists()
        ]

    def transport(self, node: Node) -> BreakableTransport:
        return BreakableTransport(Path(sys.argv[1], "down", node.name))


class BreakableChannel:
    """A channel over which nobody learns how the process on a broken node ended."""

    def __init__(self, channel: Channel, down: Path) -> None:
        self._channel, self._down = channel, down
        self.send, self.finish, self.kill = channel.send, channel.finish, channel.kill

    def exit_code(self) -> int | None:
        return None if self._down.exists() else self._channel.exit_code()


class BreakableTransport(LocalTransport):
    """Child processes, while a file does not exist."""

    def __init__(self, down: Path) -> None:
        super().__init__()
        self._down = down

    def run(self, argv: Sequence[str], *, timeout: float, stdin: bytes = b"") -> Completed:
        self._refuse()
        return super().run(argv, timeout=timeout, stdin=stdin)

    def open(
        self, argv: Sequence[str], *, on_line: OnLine, stderr: Path, environment: Mapping[str, str]
    ) -> Channel:
        self._refuse()
        channel = super().open(argv, on_line=on_line, stderr=stderr, environment=environment)
        return BreakableChannel(channel, self._down)

    def _refuse(self) -> None:
        if self._down.exists():
            raise TransportError(f"{self._down.name}: no answer")


if __name__ == "__main__":
    registry.BACKENDS["local"] = "tests.support.breakable:BreakableNodes"
    limits_for = supervisor.limits_for
    quarantine, step_up = (float(word) for word in sys.argv[2:4])
    times = {
        "quarantine": quarantine,
        "look_again": 1.0,
        "step_up_look": step_up,
        "step_up_back_off": step_up,
    }
    supervisor.limits_for = lambda *given: replace(limits_for(*given), **times)
    sys.exit(supervisor.main(sys.argv[1:2]))
