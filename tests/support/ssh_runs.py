"""Runs over the nodes of an SSH bed: a real supervisor here, real agents there, ranks that are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain import __version__
from llmtrain.config.job import resolve
from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.render.scripts import render
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.supervise.create import create_run
from tests.support import stand_in
from tests.support.beds import SshBed

PROFILE = """\
name: bed
nodes: {nodes}
spares: {spares}
gpus_per_node: {per_node}
accelerator: cpu
intra_node: {{kind: shared-memory}}
inter_node: {{data: {{kind: tcp}}, control: {{kind: tcp}}}}
storage: {{path: {storage}, bandwidth: 1 GB/s}}
backend:
  kind: ssh
  python: {python}
  ssh:
    hosts: {hosts}
    connect_timeout: 3s
    retries: 1
"""


def write_profile(
    path: Path,
    bed: SshBed,
    *,
    nodes: int = 4,
    spares: int = 0,
    per_node: int = 2,
    python: str = sys.executable,
) -> Path:
    """A cluster profile over the first nodes of a bed; run directories lie beside it."""
    hosts = [*bed.names[:nodes]]
    text = PROFILE.format(
        nodes=nodes,
        spares=spares,
        per_node=per_node,
        storage=path.parent / "runs",
        python=python,
        hosts=hosts,
    )
    path.write_text(text)
    return path


def make_run(path: Path, profile: Path, *, overrides: tuple[str, ...] = (), **behaviour: object) -> RunDir:
    """A run of the tiny recipe at dp2 x tp2 x pp2 whose node script starts the stand-in."""
    spec = resolve("tiny", str(profile), overrides)
    plan = make_plan(spec)
    run = RunDir(path)
    job = JobFile(run_id=run.run_id, version=__version__, spec=spec, layout=plan.plans[0].layout)
    create_run(run, render(job, plan_document(plan), run, python=sys.executable))
    stand_in.install(run, **behaviour)
    return run
