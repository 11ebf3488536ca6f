"""Runs on a real SLURM cluster of four nodes, with stand-in ranks: how they start, and how they end."""

from __future__ import annotations

import json
import re
import time

import pytest

from llmtrain.backends.base import JobState
from llmtrain.events.schema import AttemptStarted
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder
from llmtrain.run.record import RunRecord, read_record
from llmtrain.supervise.nodes.members import TAKEN_AWAY
from tests.slurm.conftest import MakeRun, backend_of, submit
from tests.support import hasty
from tests.support.slurm_beds import SlurmBed
from tests.support.stand_in_runs import events, step_reached, wait_for

pytestmark = pytest.mark.e2e

ONE_SPARE = ("cluster.spares=1", "parallel.dp=3", "batch.global=12", "faults.node_loss_budget=0.5")
"""Three nodes of ranks and a fourth in reserve; of four nodes, one is more than the usual budget allows."""


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


def test_a_folder_of_any_name(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run(name="we ird 'q' \"d\" $(touch pwned) `touch pwned` 50%j \u00e9 ; --x # y", steps=3)
    job = submit(run).id
    assert wait_ended(run).exit_status == 0
    assert (run.path / f"slurm-{job}.log").exists()
    assert not list(run.path.parent.rglob("pwned"))


def test_ranks_find_each_other_by_the_nodes_own_network(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run(steps=2)
    node = run.scripts / "node.sh"
    node.write_text(node.read_text().replace("exec", 'echo "$5 $GLOO_SOCKET_IFNAME" >>"$0.said"\nexec', 1))
    submit(run)
    assert wait_ended(run).exit_status == 0
    said = (run.scripts / "node.sh.said").read_text().splitlines()
    assert said == [f"{slurm_bed.address('node1')} eth0"] * 4


def test_the_early_warning_saves_requeues_and_goes_on(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run(steps=40, step_seconds=0.2)
    job = submit(run).id
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.slurm("scancel", "--batch", "--signal=USR1", job)
    assert wait_ended(run).exit_status == 75
    saved = int((run.path / "saved").read_text())
    wait_state(slurm_bed, job, "PENDING")
    slurm_bed.start_now(job)
    record = wait_for(
        lambda: (found := ended(run)) and found.exit_status == 0 and found, 90, "the second start"
    )
    assert isinstance(record, RunRecord)
    assert [attempt.outcome for attempt in record.attempts] == ["stopped", "completed"]
    assert slurm_bed.restarts(job) == 1
    restored = [event.payload.step for event in events(run, "restored")]
    assert restored == [0, saved]
    steps = [event.payload.step for event in events(run, "step_finished")]
    assert steps == list(range(1, 41))
    assert len(list(run.requeues.iterdir())) == 1


def test_a_preempted_job_saves_and_yields_within_its_time_of_grace(
    slurm_bed: SlurmBed, make_run: MakeRun
) -> None:
    """Grace begins with a signal to all steps, and none to the batch script."""
    run = make_run(steps=60, step_seconds=0.3, checkpoint_every=1000)
    job = submit(run).id
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.slurm("scancel", "--signal=TERM", job)
    record = wait_ended(run, 20)
    assert (record.exit_status, [each.outcome for each in record.attempts]) == (75, ["stopped"]), record
    assert int((run.path / "saved").read_text()) >= 3
    wait_state(slurm_bed, job, "PENDING", seconds=30)
    assert slurm_bed.restarts(job) == 1


def test_an_administrators_requeue_saves_and_goes_on(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    """All processes of the job are signalled at once, the supervisor by the batch script once more."""
    run = make_run(steps=60, step_seconds=0.3, checkpoint_every=1000)
    job = submit(run).id
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.slurm("scontrol", "requeue", job)
    assert wait_ended(run, 20).exit_status == 75
    saved = int((run.path / "saved").read_text())
    wait_state(slurm_bed, job, "PENDING", seconds=30)
    slurm_bed.start_now(job)
    wait_for(lambda: step_reached(run, saved + 2, 2), 60, "steps of the second start")
    assert [event.payload.step for event in events(run, "restored")] == [0, saved]
    assert slurm_bed.restarts(job) == 1


def test_scancel_ends_the_job_for_good(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run(steps=200)
    handle = submit(run)
    wait_for(lambda: step_reached(run, 2), 60, "step 2")
    slurm_bed.slurm("scancel", handle.id)
    wait_state(slurm_bed, handle.id, "CANCELLED")
    time.sleep(3.0)
    assert slurm_bed.state(handle.id) == "CANCELLED"
    assert slurm_bed.restarts(handle.id) == 0
    assert backend_of(run).poll(handle).state == JobState.CANCELLED
    assert not processes(slurm_bed, run)


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


@pytest.mark.parametrize("fault", ["crash", "power"])
def test_a_lost_node_that_slurm_has_not_noticed(slurm_bed: SlurmBed, make_run: MakeRun, fault: str) -> None:
    run = make_run(*ONE_SPARE, steps=80, step_seconds=0.5)
    submit(run)
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.fault(fault, "node3")
    wait_for(lambda: len(nodes_of_attempts(run)) > 1, 90, "the next attempt")
    attempt = len(nodes_of_attempts(run))
    reached = read_record(run).reached_step
    wait_for(lambda: step_reached(run, reached + 2, attempt) or ended(run), 120, "steps on other nodes")
    assert "node3" not in nodes_of_attempts(run)[-1]


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


def test_a_chain_goes_on_with_the_next_job_and_ends_with_the_run(
    slurm_bed: SlurmBed, make_run: MakeRun
) -> None:
    run = make_run(
        "cluster.backend.slurm.chain=singleton",
        "cluster.backend.slurm.chain_length=3",
        steps=40,
        step_seconds=0.2,
    )
    handle = submit(run)
    first, second, third = handle.id.split(",")
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    assert slurm_bed.state(second) == "PENDING"
    slurm_bed.slurm("scancel", "--batch", "--signal=USR1", first)
    # Slurm may look at a dependency only in its next full pass, a minute later.
    wait_state(slurm_bed, second, "RUNNING", seconds=150.0)
    assert backend_of(run).poll(handle).state == JobState.RUNNING
    record = wait_for(
        lambda: (found := ended(run)) and found.exit_status == 0 and found, 90, "the second job"
    )
    assert isinstance(record, RunRecord)
    wait_state(slurm_bed, third, "CANCELLED")
    assert slurm_bed.state(first) == "FAILED"  # left with 75
    assert slurm_bed.restarts(first) == 0


def test_an_array_chain(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run(
        "cluster.backend.slurm.chain=array",
        "cluster.backend.slurm.chain_length=3",
        steps=30,
        step_seconds=0.2,
    )
    handle = submit(run)
    wait_for(lambda: step_reached(run, 3), 60, "step 3")
    slurm_bed.slurm("scancel", "--batch", "--signal=USR1", f"{handle.id}_1", check=False)
    wait_for(lambda: (found := ended(run)) and found.exit_status == 0 and found, 180, "the second task")
    wait_for(lambda: slurm_bed.state(f"{handle.id}_3") in ("CANCELLED", ""), 30, "the third task to vanish")
    logs = sorted(path.name for path in run.path.glob("slurm-*.log"))
    assert logs == [f"slurm-{handle.id}_1.log", f"slurm-{handle.id}_2.log"]


def test_a_job_that_waits_is_taken_out_of_the_queue(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    blocker = make_run(steps=400)
    submit(blocker)
    run = make_run(steps=5)
    handle = submit(run)
    backend = backend_of(run)
    status = wait_for(lambda: (found := backend.poll(handle)).reason and found, 10, "a reason")
    assert (status.state, status.raw) == (JobState.PENDING, "PENDING")
    assert re.fullmatch("Resources|Priority", status.reason)
    backend.cancel(handle)
    wait_state(slurm_bed, handle.id, "CANCELLED")
    assert not run.attempts.exists()


def test_set_up_that_fails_ends_the_job_with_two(slurm_bed: SlurmBed, make_run: MakeRun) -> None:
    run = make_run("cluster.backend.slurm.setup=[echo hello from setup, /no/such/program --x]")
    handle = submit(run)
    wait_state(slurm_bed, handle.id, "FAILED")
    log = (run.path / f"slurm-{handle.id}.log").read_text()
    assert "hello from setup" in log
    assert "set-up failed: /no/such/program --x" in log
    assert backend_of(run).poll(handle).exit_code == 2


def test_variables_reach_ranks_and_never_a_file(
    slurm_bed: SlurmBed, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BED_TOKEN", "s3cr3t-7041")
    monkeypatch.setenv("BED_OTHER", "other")
    for export, said in (("all", "11other"), ("none", "11")):
        run = make_run(
            "cluster.environment.pass_through=[BED_TOKEN]", f"cluster.backend.slurm.export={export}", steps=2
        )
        node = run.scripts / "node.sh"
        node.write_text(
            node.read_text().replace("exec", 'echo "${#BED_TOKEN}${BED_OTHER:-}" >>"$0.said"\nexec', 1)
        )
        submit(run)
        assert wait_ended(run).exit_status == 0
        assert (run.scripts / "node.sh.said").read_text().split() == [said] * 4
        for path in run.path.rglob("*"):
            assert not path.is_file() or b"s3cr3t-7041" not in path.read_bytes(), path
        assert "s3cr3t" not in json.dumps(processes(slurm_bed, run))
