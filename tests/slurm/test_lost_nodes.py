"""Jobs on a real SLURM cluster that lose something: nodes, the supervisor, the batch host, the controller."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from llmtrain.backends.base import JobState
from llmtrain.run.lease import read_holder
from llmtrain.run.record import read_record
from llmtrain.supervise.nodes.members import TAKEN_AWAY
from tests.slurm.conftest import (
    ONE_SPARE,
    MakeRun,
    backend_of,
    ended,
    nodes_of_attempts,
    processes,
    submit,
    wait_ended,
    wait_state,
)
from tests.support import hasty
from tests.support.slurm_beds import SlurmBed
from tests.support.stand_in_runs import events, step_reached, wait_for

pytestmark = pytest.mark.e2e

THREE_OF_FOUR = ("parallel.dp=3", "batch.global=12", "faults.node_loss_budget=0.5")
"""A layout that leaves a node of the profile alone; of the three, one may be lost."""


def test_a_downed_node_is_left_out_and_a_spare_takes_its_place(
    slurm_bed: SlurmBed, make_run: MakeRun
) -> None:
    run = make_run(*ONE_SPARE, steps=60, step_seconds=0.2)
    job = submit(run).id
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.slurm("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    record = wait_ended(run, 120)
    assert record.exit_status == 0, record
    first, *_, last = nodes_of_attempts(run)
    assert first == ["node1", "node2", "node3"]
    assert last == ["node1", "node3", "node4"]
    assert record.lost_nodes == ("node2",)
    assert slurm_bed.restarts(job) == 0
    steps = [event.payload.step for event in events(run, "step_finished")]
    assert max(steps) == 60


def test_a_downed_node_without_a_spare_costs_a_rung(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    """And a node that Slurm has taken out of a job does not come back to it: nobody waits for that."""
    run = make_run("faults.node_loss_budget=0.5", "batch.global=12", steps=60, step_seconds=0.2)
    hasty.take_over(run)
    job = submit(run).id
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.slurm("scontrol", "update", "nodename=node3", "state=down", "reason=test")
    wait_for(lambda: len(nodes_of_attempts(run)) > 1, 90, "the next attempt")
    slurm_bed.slurm("scontrol", "update", "nodename=node3", "state=resume")
    record = wait_ended(run, 120)
    assert (record.exit_status, record.reached_step) == (0, 60)
    assert record.lost_nodes == ("node3",)
    assert [loss.why for loss in record.losses] == [TAKEN_AWAY]
    started = [event.payload for event in events(run, "attempt_started")]
    assert (started[0].nodes, started[0].rung) == (("node1", "node2", "node3", "node4"), 0)
    assert (started[-1].nodes, started[-1].rung) == (("node1", "node2", "node4"), 3)
    assert started[-1].layout["dp"] == 3
    assert "rung of the ladder for 3 nodes, node3 lost: dp4 pp2 -> dp3 pp2" in started[-1].membership
    assert slurm_bed.restarts(job) == 0, "the job goes on; only the ranks were started again"
    assert max(event.payload.step for event in events(run, "restored")) >= 2


@pytest.mark.parametrize(
    ("fault", "settings", "rung", "left"),
    [("crash", THREE_OF_FOUR, 2, ["node1", "node2"]), ("power", ONE_SPARE, 0, ["node1", "node2", "node4"])],
)
def test_a_lost_node_that_slurm_has_not_noticed(
    slurm_bed: SlurmBed,
    make_run: MakeRun,
    fault: str,
    settings: Sequence[str],
    rung: int,
    left: Sequence[str],
) -> None:
    """With a spare, and of a job that has the nodes of its layout only: fewer than the profile."""
    run = make_run(*settings, steps=80, step_seconds=0.5)
    submit(run)
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.fault(fault, "node3")
    wait_for(lambda: len(nodes_of_attempts(run)) > 1, 90, "the next attempt")
    attempt = len(nodes_of_attempts(run))
    reached = read_record(run).reached_step
    wait_for(lambda: step_reached(run, reached + 2, attempt) or ended(run), 120, "steps on other nodes")
    first, *_, last = [event.payload for event in events(run, "attempt_started")]
    assert (list(first.nodes), first.rung) == (["node1", "node2", "node3"], 0)
    assert (list(last.nodes), last.rung, last.layout["dp"]) == (left, rung, len(left))
    record = read_record(run)
    assert record.lost_nodes == ("node3",) and len(record.nodes) == 3 + ("node4" in left)


def test_a_killed_supervisor_is_started_again_by_the_batch_script(
    slurm_bed: SlurmBed, make_run: MakeRun
) -> None:
    run = make_run(steps=40, step_seconds=0.2)
    job = submit(run).id
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    holder = read_holder(run)
    assert holder is not None and holder.allocation == f"slurm:{job}:0"
    slurm_bed.run("node1", "kill", "-KILL", str(holder.process.pid))
    record = wait_ended(run, 90)
    assert record.exit_status == 0
    assert [attempt.outcome for attempt in record.attempts] == ["abandoned", "completed"]
    assert slurm_bed.restarts(job) == 0 and not run.requeues.exists()
    assert "died with exit code 137" in (run.path / f"slurm-{job}.log").read_text()
    restored = [event.payload.step for event in events(run, "restored")]
    assert restored[1] >= 3  # the agents without a supervisor let their ranks save


@pytest.mark.parametrize("fault", ["crash", "power"])
def test_a_lost_batch_host_is_replaced_by_one_requeue(
    slurm_bed: SlurmBed, make_run: MakeRun, fault: str
) -> None:
    run = make_run(
        "cluster.nodes=3", "cluster.spares=0", "parallel.dp=3", "batch.global=12", steps=60, step_seconds=0.5
    )
    job = submit(run).id
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    holder = read_holder(run)
    assert holder is not None
    host = holder.process.host
    slurm_bed.fault(fault, host)
    wait_for(lambda: slurm_bed.restarts(job) == 1, 150, "an agent to queue the job again")
    wait_state(slurm_bed, job, "PENDING", seconds=90)
    slurm_bed.start_now(job)
    record = wait_ended(run, 120)
    assert record.exit_status == 0
    assert slurm_bed.restarts(job) == 1
    assert len(list(run.requeues.iterdir())) == 1
    last = read_holder(run)
    assert last is not None and last.allocation == f"slurm:{job}:1" and last.process.host != host
    assert host not in nodes_of_attempts(run)[-1]


def test_a_batch_host_lost_between_two_attempts_is_replaced_too(
    slurm_bed: SlurmBed, make_run: MakeRun
) -> None:
    """Then no agent runs that would notice; lookouts do."""
    run = make_run(
        *("cluster.nodes=3", "cluster.spares=0", "parallel.dp=3", "batch.global=12"),
        "faults.restarts_without_progress=6",
        steps=20,
        step_seconds=0.2,
        no_checkpoints=True,
        die={"rank": 1, "step": 1, "attempts": [1, 2, 3, 4]},
    )
    job = submit(run).id
    wait_for(lambda: len(events(run, "attempt_ended")) == 4, 150, "four attempts, and a longer pause")
    holder = read_holder(run)
    assert holder is not None
    slurm_bed.fault("crash", holder.process.host)
    assert not read_record(run).attempts[4:]
    wait_for(lambda: slurm_bed.restarts(job) == 1, 150, "a lookout to queue the job again")
    # Slurm may start it as soon as the lost node counts as down, or only after two minutes.
    wait_state(slurm_bed, job, "PENDING", "RUNNING", "COMPLETED", seconds=90)
    if slurm_bed.state(job) == "PENDING":
        slurm_bed.start_now(job)
    assert wait_ended(run, 120).exit_status == 0
    assert slurm_bed.restarts(job) == 1
    slurm_bed.restore()
    assert not processes(slurm_bed, run)


def test_the_controller_may_be_away_for_a_while(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run(steps=60, step_seconds=0.2)
    handle = submit(run)
    wait_for(lambda: step_reached(run, 2), 60, "step 2")
    time.sleep(6.0)  # A job that started less than some 5 s before the controller dies may be forgotten.
    backend = backend_of(run)
    assert backend.poll(handle).state == JobState.RUNNING
    slurm_bed.daemon("ctld-kill")
    try:
        time.sleep(2.5)
        status = backend.poll(handle)
        assert status.state == JobState.RUNNING
        assert "does not answer" in status.reason
    finally:
        slurm_bed.daemon("ctld-start")
    assert wait_ended(run, 60).exit_status == 0
