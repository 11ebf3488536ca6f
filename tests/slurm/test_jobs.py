"""Runs on a real SLURM cluster of four nodes, with stand-in ranks: how they start, and how they end."""

from __future__ import annotations

import json
import re
import time

import pytest

from llmtrain.backends.base import JobState
from llmtrain.run.record import RunRecord
from tests.slurm.conftest import MakeRun, backend_of, ended, processes, submit, wait_ended, wait_state
from tests.support.slurm_beds import SlurmBed
from tests.support.stand_in_runs import events, step_reached, wait_for

pytestmark = pytest.mark.e2e


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
