"""What follows a job's end: the decision as a table, and that of many candidates one queues the job again."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain import __version__
from llmtrain.backends.slurm.end import CLAIM_SECONDS, FRESH_SECONDS, Settlement, Situation, decide
from llmtrain.backends.slurm.states import JobRow
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import acquire
from llmtrain.run.record import RunRecord, write_record
from llmtrain.supervise.stop import ask_to_stop
from tests.support.run_folder import write_job_file

STOPPED = Situation(
    status=75,
    stop_requested=False,
    state="RUNNING",
    restarts=0,
    requeue=True,
    requeue_limit=5,
    waiting=False,
    idle_starts=0,
)


@pytest.mark.parametrize(
    ("change", "sequel"),
    [
        ({}, "requeue"),
        ({"status": 137}, "requeue"),
        ({"status": 143, "restarts": 4}, "requeue"),
        ({"idle_starts": 2}, "requeue"),
        # the run has ended: nothing of a chain is left to do
        ({"status": 0}, "cancel_rest"),
        ({"status": 1}, "cancel_rest"),
        ({"status": 2}, "cancel_rest"),
        ({"status": 3}, "cancel_rest"),
        ({"status": 93}, "cancel_rest"),
        ({"status": 93, "waiting": True}, "cancel_rest"),
        ({"stop_requested": True}, "cancel_rest"),
        ({"stop_requested": True, "waiting": True}, "cancel_rest"),
        # somebody else goes on
        ({"waiting": True}, "leave"),
        # the profile or the limits say no
        ({"requeue": False}, "leave"),
        ({"restarts": 5}, "leave"),
        ({"requeue_limit": 0}, "leave"),
        ({"idle_starts": 3}, "leave"),
        # SLURM would revive a job that it ends for good
        ({"state": "COMPLETING"}, "leave"),
        ({"state": "CANCELLED"}, "leave"),
        ({"state": "TIMEOUT"}, "leave"),
        ({"state": "PREEMPTED"}, "leave"),
        ({"state": "PENDING"}, "leave"),
        ({"state": "unknown"}, "leave"),
    ],
)
def test_decisions(change: dict[str, object], sequel: str) -> None:
    decided, why = decide(replace(STOPPED, **change))  # type: ignore[arg-type]
    assert decided == sequel
    assert why


class Calls:
    """Answers of the controller, and what it was asked to do."""

    def __init__(self) -> None:
        self.state, self.restarts, self.requeued, self.lock = "RUNNING", 0, 0, threading.Lock()

    def queue(self, jobs: list[str]) -> list[JobRow]:
        return [JobRow(id=jobs[0], state=self.state, restarts=self.restarts)]

    def requeue(self, job: str) -> None:
        with self.lock:
            self.requeued += 1
            self.state, self.restarts = "COMPLETING", self.restarts + 1

    def cancel(self, job: str, *, pending_only: bool = False) -> None:
        raise AssertionError("nothing is to be cancelled")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = resolve("tiny", "a100-32x8", ["cluster.accelerator=cpu"])
    run = RunDir(tmp_path / "run-1")
    run.path.mkdir()
    job = JobFile(run_id="run-1", version=__version__, spec=spec, layout=Layout())
    write_job_file(run.job_json, job)
    write_record(run, RunRecord(run_id="run-1", created=0.0, stage="running"))
    return run


def settlement(run: RunDir, calls: Calls, restarts: int = 0, slept: list[float] | None = None) -> Settlement:
    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    made = Settlement(run, environment, sleep=(slept if slept is not None else []).append)
    made._calls = calls  # type: ignore[assignment]
    return made


def make_old(run: RunDir, seconds: float) -> None:
    """The lease as it looks when its holder has not renewed it for so long."""
    [path] = run.lease.glob("*.json")
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_of_many_agents_one_queues_the_job_again(run: RunDir) -> None:
    acquire(run)
    make_old(run, FRESH_SECONDS + 5)
    calls = Calls()
    threads = [threading.Thread(target=settlement(run, calls).orphaned) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.requeued == 1
    assert [path.name for path in run.requeues.iterdir()] == ["7-0.json"]


def test_a_claim_whose_owner_vanished_passes_on(run: RunDir) -> None:
    acquire(run)
    make_old(run, FRESH_SECONDS + 5)
    claim = run.requeues / "7-0.json"
    claim.parent.mkdir()
    claim.write_text("{}")
    calls, slept = Calls(), list[float]()
    assert settlement(run, calls, slept=slept).orphaned() == 1
    assert calls.requeued == 0 and slept  # it is not late yet
    then = claim.stat().st_mtime - CLAIM_SECONDS - 1
    os.utime(claim, (then, then))
    assert settlement(run, calls).orphaned() == 0
    assert calls.requeued == 1


def test_a_supervisor_that_was_started_again_is_in_charge(run: RunDir) -> None:
    lease = acquire(run)
    calls, slept = Calls(), list[float]()
    made = settlement(run, calls, slept=slept)

    def successor(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            acquire(run, dead=lease.token)

    made._sleep = successor
    assert made.orphaned() == 0
    assert calls.requeued == 0 and len(slept) == 2


def test_a_supervisor_that_renews_is_in_charge(run: RunDir) -> None:
    acquire(run)
    calls = Calls()
    made = settlement(run, calls)
    make_old(run, 4)

    def renew(seconds: float) -> None:
        [path] = run.lease.glob("*.json")
        os.utime(path)

    made._sleep = renew
    assert made.orphaned() == 0
    assert calls.requeued == 0


def test_a_supervisor_that_left_in_order_needs_no_help(run: RunDir) -> None:
    acquire(run).release()
    calls = Calls()
    assert settlement(run, calls).orphaned() == 0
    assert calls.requeued == 0


@pytest.mark.parametrize(("state", "restarts"), [("CANCELLED", 0), ("PENDING", 1), ("RUNNING", 1)])
def test_a_job_that_is_ended_or_went_on_is_left_alone(run: RunDir, state: str, restarts: int) -> None:
    acquire(run)
    make_old(run, FRESH_SECONDS + 5)
    calls = Calls()
    calls.state, calls.restarts = state, restarts
    assert settlement(run, calls).orphaned() == 0
    assert calls.requeued == 0


def test_a_job_that_brings_the_run_no_further_is_not_started_for_ever(run: RunDir) -> None:
    calls = Calls()
    for restarts in range(4):
        calls.state = "RUNNING"
        settlement(run, calls, restarts).ended(75)
    assert calls.requeued == 3
    write_record(run, RunRecord(run_id="run-1", created=0.0, stage="ended", stop_requested=True))
    assert settlement(run, calls, 9).ended(75) == 0


def test_an_allocation_is_remembered_and_a_dead_one_gives_way(run: RunDir) -> None:
    from llmtrain.errors import UsageError
    from llmtrain.run.lease import read_holder

    first = acquire(run, allocation="slurm:7:0")
    holder = read_holder(run)
    assert holder is not None and holder.allocation == "slurm:7:0"
    with pytest.raises(UsageError, match="already supervised"):
        acquire(run, allocation="slurm:7:1")
    second = acquire(run, allocation="slurm:7:1", dead=first.token)
    assert second.token == first.token + 1
    first.release()  # fenced: the file of its successor stays as it is
    holder = read_holder(run)
    assert holder is not None and not holder.released and holder.allocation == "slurm:7:1"
    second.release()
    holder = read_holder(run)
    assert holder is not None and holder.released and holder.allocation == "slurm:7:1"


@pytest.mark.parametrize("status", [75, 143])
def test_a_stop_that_nobody_could_record(run: RunDir, status: int) -> None:
    """The supervisor was told to leave before it could look: the job must not be queued again."""
    calls = Calls()
    ask_to_stop(run, now=True)
    settlement(run, calls).ended(status)
    assert calls.requeued == 0


def test_a_stop_whose_supervisor_vanished(run: RunDir) -> None:
    acquire(run)
    make_old(run, FRESH_SECONDS + 5)
    calls = Calls()
    ask_to_stop(run, now=True)
    settlement(run, calls).orphaned()
    assert calls.requeued == 0
