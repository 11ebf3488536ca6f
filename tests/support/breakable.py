"""Several nodes on this machine that can be broken: real agents, scripts and processes, no network.

They are those of a rehearsal (`llmtrain/backends/rehearsed.py`). `python -m tests.support.breakable RUN_DIR
QUARANTINE STEP_UP` is the supervisor of a run over such nodes, with these limits in seconds.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from llmtrain import __version__
from llmtrain.backends.rehearsed import RehearsedNodes, lose_stand_in, return_node
from llmtrain.config.job import JobSpec, resolve
from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.render.scripts import render
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.supervise import __main__ as supervisor
from llmtrain.supervise.create import create_run
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


class BreakableNodes(RehearsedNodes):
    """Nodes whose losses are as good as real ones: they are remembered."""

    is_rehearsed = False


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
    nodes = read_record(run).attempts[-1].nodes
    lose_stand_in(run, name, nodes.index(name) if name in nodes else None)


def mend_node(run: RunDir, name: str) -> None:
    """Let a node be reached again."""
    return_node(run, name)


if __name__ == "__main__":
    quarantine, step_up = (float(word) for word in sys.argv[2:4])
    times = {
        "quarantine": quarantine,
        "look_again": 1.0,
        "step_up_look": step_up,
        "step_up_back_off": step_up,
    }
    sys.exit(supervisor.main(sys.argv[1:2], BreakableNodes, lambda limits: replace(limits, **times)))
