"""Fixtures of the SLURM tests: a real cluster, and runs on it whose ranks are the torch-free stand-in."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain import __version__
from llmtrain.backends.base import JobHandle
from llmtrain.backends.slurm.backend import SlurmBackend
from llmtrain.config.job import resolve
from llmtrain.events.schema import AttemptStarted
from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.render.scripts import render
from llmtrain.run.job_file import JobFile, read_job_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import RunRecord, read_record
from llmtrain.supervise.create import create_run
from tests.support import stand_in
from tests.support.slurm_beds import SlurmBed, _slurm_bed, bed_user, slurm_bed
from tests.support.stand_in_runs import events, prepared_corpus, use_corpus, wait_for

__all__ = ["_slurm_bed", "bed_user", "slurm_bed"]

PROFILE = """
name: bed
nodes: 4
gpus_per_node: 2
accelerator: cpu
intra_node: {{kind: shared-memory}}
inter_node: {{data: {{kind: tcp}}, control: {{kind: tcp}}}}
storage: {{path: {storage}, bandwidth: 500 MB/s}}
backend: {{kind: slurm, slurm: {{partition: gpu, mem: 1G, time: 30m, signal_seconds: 60}}}}
environment: {{variables: {{OMP_NUM_THREADS: 1}}}}
"""

MakeRun = Callable[..., RunDir]
ONE_SPARE = ("cluster.spares=1", "parallel.dp=3", "batch.global=12", "faults.node_loss_budget=0.5")
"""Three nodes of ranks and a fourth in reserve; of four nodes, one is more than the usual budget allows."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all nodes and all users see; not below pytest's own, which is private."""
    with tempfile.TemporaryDirectory(prefix="llmtrain-slurm-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        path.chmod(0o777)
        yield path


@pytest.fixture
def profile(shared: Path) -> Path:
    """A cluster profile of the bed."""
    path = shared / "bed.yaml"
    path.write_text(PROFILE.format(storage=shared / "runs"))
    return path


@pytest.fixture(scope="session")
def corpus() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="llmtrain-slurm-") as folder:
        yield prepared_corpus(Path(folder))


@pytest.fixture
def make_run(profile: Path, shared: Path, corpus: Path) -> MakeRun:
    """`make_run("cluster.spares=1", steps=20)`: a run whose ranks are the stand-in, not submitted yet."""

    def make(*overrides: str, name: str = "run", **behaviour: object) -> RunDir:
        wanted = ("parallel.dp=4", "parallel.tp=1", "parallel.pp=2", "batch.micro=1", *overrides)
        spec = resolve("tiny", str(profile), wanted)
        plan = make_plan(spec)
        run = RunDir(shared / "runs" / f"{name}-{len(list(shared.glob('runs/*')))}")
        job = JobFile(run_id=run.run_id, version=__version__, spec=spec, layout=plan.plans[0].layout)
        create_run(run, render(job, plan_document(plan), run, python=sys.executable))
        stand_in.install(run, **behaviour)
        use_corpus(run, corpus)
        return run

    return make


def backend_of(run: RunDir) -> SlurmBackend:
    return SlurmBackend(read_job_file(run.job_json).spec.cluster)


def submit(run: RunDir) -> JobHandle:
    return backend_of(run).submit(run, read_job_file(run.job_json))


def the_job(bed: SlurmBed, handle: JobHandle) -> str:
    """Id of a submitted job, for the bed's own questions."""
    assert handle.id.isdigit()
    return handle.id


def ended(run: RunDir) -> RunRecord | None:
    record = read_record(run)
    return record if record.stage == "ended" else None


def wait_ended(run: RunDir, seconds: float = 60.0) -> RunRecord:
    record = wait_for(lambda: ended(run), seconds, f"{run.path} to end")
    assert isinstance(record, RunRecord)
    return record


def wait_state(bed: SlurmBed, job: str, *states: str, seconds: float = 60.0) -> None:
    wait_for(lambda: bed.state(job) in states, seconds, f"job {job} to be {states}, it is {bed.state(job)}")


def nodes_of_attempts(run: RunDir) -> list[list[str]]:
    found = [event.payload for event in events(run, "attempt_started")]
    return [list(payload.nodes) for payload in found if isinstance(payload, AttemptStarted)]


def processes(bed: SlurmBed, run: RunDir) -> list[str]:
    """Everything of a run on any node."""
    return [line for name in bed.names for line in bed.processes(name, str(run.path))]
