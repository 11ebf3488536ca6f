"""Where the launch contract is tried: this machine, real SSH nodes, a real SLURM cluster; one class each.

A place gives profiles and runs; whatever else differs between the backends is not the contract's business.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmtrain import __version__
from llmtrain.backends.base import JobHandle, JobState
from llmtrain.backends.registry import load_backend
from llmtrain.config.job import resolve
from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.render.scripts import render
from llmtrain.run.job_file import JobFile, read_job_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import RunRecord, read_record
from llmtrain.supervise.create import create_run
from tests.support import stand_in
from tests.support import stand_in_runs as runs
from tests.support.beds import SshBed
from tests.support.launches import EIGHT_RANKS, SMALL, sets

NODES, PER_NODE = 4, 2


@dataclass
class Place:
    """One backend with all that it needs, as a person has it."""

    kind: str
    folder: Path
    """Shared by all nodes; run directories lie below `runs`."""
    profile: str
    corpus: Path
    bed: SshBed | None = None
    made: list[RunDir] = field(default_factory=list)

    @property
    def hosts(self) -> dict[int, str]:
        """Rank -> host that it has to run on."""
        here = os.uname().nodename
        return {rank: here if self.bed is None else f"node{1 + rank // PER_NODE}" for rank in range(8)}

    # ---- as typed
    def command(self, *words: object, status: int = 0, seconds: float = 240) -> tuple[str, str]:
        """Run `llmtrain` to its end; its standard output and error."""
        done = subprocess.run(
            [sys.executable, "-m", "llmtrain", *map(str, words)],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == status, (
            f"exit code {done.returncode}, not {status}:\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout, done.stderr

    def launch(self, run: RunDir, *options: str) -> tuple[str, str]:
        """`llmtrain launch` of the small model on eight ranks."""
        self.made.append(run)
        where = ("--cluster", self.profile, "--run-dir", run.path)
        storage = [f"cluster.storage.path={self.folder}/runs"]
        return self.command("launch", "tiny", *where, *options, *sets(*SMALL, *EIGHT_RANKS, *storage))

    # ---- with stand-ins for ranks
    def make(self, name: str, *overrides: str, **behaviour: object) -> RunDir:
        """A run that is written and not started, whose ranks do as they are told."""
        storage = f"cluster.storage.path={self.folder}/runs"
        spec = resolve("tiny", self.profile, (*EIGHT_RANKS, "batch.micro=1", storage, *overrides))
        plan, run = make_plan(spec), RunDir(self.folder / "runs" / name)
        job = JobFile(run_id=name, version=__version__, spec=spec, layout=plan.plans[0].layout)
        create_run(run, render(job, plan_document(plan), run, python=sys.executable))
        stand_in.install(run, **behaviour)
        runs.use_corpus(run, self.corpus)
        self.made.append(run)
        return run

    def submit(self, run: RunDir) -> JobHandle:
        """What launch and resume do once all is written and checked."""
        job = read_job_file(run.job_json)
        return load_backend(job.spec.cluster).submit(run, job)

    def wait_gone(self, run: RunDir, handle: JobHandle) -> None:
        """Wait until what was submitted has left, for a scheduler some seconds after the run's own end."""
        backend = load_backend(read_job_file(run.job_json).spec.cluster)
        alive = (JobState.PENDING, JobState.RUNNING)
        runs.wait_for(lambda: backend.poll(handle).state not in alive, 90, f"{handle} to end")

    def kill_rank(self, run: RunDir, rank: int) -> None:
        """SIGKILL a rank of the newest attempt, on whatever machine it runs."""
        pid = runs.rank_pid(run, rank)
        if self.bed is None:
            os.kill(pid, 9)
        else:
            self.bed.run(f"node{1 + rank // PER_NODE}", "kill", "-9", str(pid))

    def clean_up(self) -> None:
        """End whatever a failed test left."""
        for run in self.made:
            runs.clean_up(run)


def ended(run: RunDir, seconds: float = 180.0) -> RunRecord:
    """The record of a run once it has ended and nobody supervises it."""

    def done() -> RunRecord | None:
        try:
            record = read_record(run)
        except Exception:
            return None
        return record if record.stage == "ended" else None

    record = runs.wait_for(done, seconds, f"{run.path} to end")
    assert isinstance(record, RunRecord)
    return record


def losses(run: RunDir) -> dict[int, float]:
    """Loss of every step; a step that was done again must have the same."""
    found: dict[int, float] = {}
    for event in runs.events(run, "step_finished"):
        assert found.setdefault(event.payload.step, event.payload.loss) == event.payload.loss
    return found


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the small model on eight ranks of this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    place = Place(kind="local", folder=folder, profile="local", corpus=folder)
    run = RunDir(folder / "runs" / "undisturbed")
    place.launch(run)
    return losses(run)


def documents(text: str) -> dict[str, object]:
    """The one JSON object of a command's standard output."""
    found = json.loads(text)
    assert isinstance(found, dict) and found["schema"] == 1
    return found
