"""Lost nodes, with real agents and processes: spares, rungs, quarantine, the budget, and a person's word."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain.observe.document import status_document
from llmtrain.observe.run_reader import read_view
from llmtrain.run.job_file import read_attempt_file, read_job_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import AttemptRecord, read_record
from llmtrain.supervise.attempts.step_up import may_restart_for_gain
from llmtrain.supervise.decision.allowance import allow_fewer
from tests.support import breakable
from tests.support import stand_in_runs as runs

FIVE = ("parallel.dp=5", "parallel.tp=1", "parallel.pp=1", "batch.micro=1", "batch.global=20")


@pytest.fixture
def make(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., RunDir]]:
    made: list[RunDir] = []

    def make_one(*overrides: str, nodes: int = 5, spares: int = 0, **behaviour: object) -> RunDir:
        spec = breakable.several_nodes(tmp_path, *overrides, nodes=nodes, spares=spares)
        made.append(breakable.make_run(tmp_path / f"run-{len(made)}", spec, **behaviour))
        runs.use_corpus(made[-1], corpus)
        return made[-1]

    yield make_one
    for run in made:
        runs.clean_up(run)


def finish(run: RunDir, supervisor: subprocess.Popen[bytes], status: int) -> str:
    assert supervisor.wait(60) == status, run.supervisor_log.read_text()
    record = read_record(run)
    assert (record.stage, record.exit_status) == ("ended", status)
    runs.assert_nothing_left(run)
    return record.message


def lose(run: RunDir, *names: str, at: int) -> None:
    """Break nodes once the newest attempt has finished a step."""
    number = len(read_record(run).attempts)
    runs.wait_for(lambda: runs.step_reached(run, at, number), what=f"step {at} of attempt {number}")
    for name in names:
        breakable.break_node(run, name)


def wait_for_attempt(run: RunDir, number: int) -> None:
    runs.wait_for(lambda: len(read_record(run).attempts) >= number, what=f"attempt {number}")


def shapes(run: RunDir) -> list[tuple[str, int]]:
    """Nodes and replicas of every attempt, as its ranks read them."""
    files = [read_attempt_file(run.attempt(number).attempt_json) for number in run.attempt_numbers()]
    return [(" ".join(file.nodes), file.layout.dp) for file in files]


def test_a_lost_node_costs_a_rung_and_the_status_says_so(make: Callable[..., RunDir]) -> None:
    run = make(*FIVE, steps=8, step_seconds=0.3)
    supervisor = breakable.supervise(run)
    wait_for_attempt(run, 1)
    lose(run, "n4", at=2)
    finish(run, supervisor, 0)
    assert shapes(run) == [("n1 n2 n3 n4 n5", 5), ("n1 n2 n3 n5", 4)]
    record = read_record(run)
    assert (record.lost_nodes, record.away, record.reached_step) == (("n4",), ("n4",), 8)
    [first, second] = [event.payload for event in runs.events(run, "attempt_started")]
    assert (first.rung, first.membership, first.idle) == (0, "", ())
    assert (second.rung, second.world_size) == (4, 4)
    assert second.membership == (
        "rung of the ladder for 4 nodes, n4 lost: dp5 -> dp4, 5 micro-batches of 1 a replica"
    )
    document = status_document(read_view(run))
    assert document["attempts"][1]["rung"] == 4
    assert document["attempts"][1]["membership"] == second.membership
    assert any("for 4 nodes, n4 lost" in moment["text"] for moment in document["events"])
    assert {entry["node"]: entry["state"] for entry in document["members"]} == {
        **dict.fromkeys(("n1", "n2", "n3", "n5"), "healthy"),
        "n4": "quarantined",
    }
    assert document["attempts"][0]["cost_seconds"] > 0


def test_two_nodes_lost_at_once_then_a_spare_of_the_rung(make: Callable[..., RunDir]) -> None:
    pipelines = ("parallel.dp=3", "parallel.tp=1", "parallel.pp=2", "batch.micro=2", "batch.global=24")
    run = make(*pipelines, "faults.node_loss_budget=0.5", nodes=6, steps=9, step_seconds=0.3)
    supervisor = breakable.supervise(run)
    wait_for_attempt(run, 1)
    lose(run, "n2", at=2)
    wait_for_attempt(run, 2)
    lose(run, "n1", at=1)
    finish(run, supervisor, 0)
    assert shapes(run) == [("n1 n2 n3 n4 n5 n6", 3), ("n1 n3 n4 n5", 2), ("n3 n4 n5 n6", 2)]
    idle = [event.payload.idle for event in runs.events(run, "attempt_started")]
    assert idle == [(), ("n6",), ()]


def test_past_the_budget_a_person_decides(make: Callable[..., RunDir]) -> None:
    run = make(*FIVE, steps=12, step_seconds=0.3)
    supervisor = breakable.supervise(run)
    wait_for_attempt(run, 1)
    lose(run, "n4", at=2)
    wait_for_attempt(run, 2)
    lose(run, "n1", at=4)
    message = finish(run, supervisor, 93)
    saved = read_record(run).committed_step
    assert saved >= 2
    assert message == (
        f"2 of 5 nodes lost (n4, n1), the budget allows 1; newest checkpoint: step {saved}; "
        f"go on with `llmtrain resume {run.path}` once nodes are back, "
        f"or on the 3 nodes left with `llmtrain resume {run.path} --nodes 3`"
    )
    # Without a word, nothing changes.
    assert "3 nodes are up, 4 are needed" in finish(run, breakable.supervise(run), 1)
    allow_fewer(run, read_job_file(run.job_json), 3)
    finish(run, breakable.supervise(run), 0)
    assert shapes(run)[-1] == ("n2 n3 n5", 3)
    assert runs.events(run, "restored")[-1].payload.step >= saved
    assert read_record(run).reached_step == 12


def test_resume_takes_up_what_has_come_back(make: Callable[..., RunDir]) -> None:
    run = make(*FIVE, "faults.node_loss_budget=0", steps=8, step_seconds=0.3)
    supervisor = breakable.supervise(run)
    wait_for_attempt(run, 1)
    lose(run, "n4", at=2)
    assert finish(run, supervisor, 93).startswith("1 of 5 nodes lost (n4), the budget allows 0")
    breakable.mend_node(run, "n4")
    finish(run, breakable.supervise(run), 0)
    record = read_record(run)
    assert shapes(run)[-1] == ("n1 n2 n3 n5 n4", 5)  # what was lost lately comes last
    assert (record.lost_nodes, record.away, record.losses[0].times) == ((), (), 1)


def test_a_node_that_comes_back_is_taken_up_at_the_next_attempt(make: Callable[..., RunDir]) -> None:
    run = make(*FIVE, steps=12, step_seconds=0.3)
    supervisor = breakable.supervise(run, quarantine=0.2)
    wait_for_attempt(run, 1)
    lose(run, "n2", at=2)
    wait_for_attempt(run, 2)
    runs.wait_for(lambda: runs.step_reached(run, 3, 2), what="a step of attempt 2")
    breakable.mend_node(run, "n2")
    os.kill(runs.rank_pid(run, 1), signal.SIGKILL)
    finish(run, supervisor, 0)
    assert [dp for _, dp in shapes(run)] == [5, 4, 5]
    assert shapes(run)[-1][0] == "n1 n2 n3 n4 n5"
    assert read_record(run).lost_nodes == ("n2",)  # it goes on counting


def test_the_run_steps_up_after_a_checkpoint_when_a_node_is_back(make: Callable[..., RunDir]) -> None:
    run = make(*FIVE, steps=24, step_seconds=0.3, checkpoint_every=4)
    supervisor = breakable.supervise(run, quarantine=0.2, step_up=0.2)
    wait_for_attempt(run, 1)
    lose(run, "n2", at=2)
    wait_for_attempt(run, 2)
    runs.wait_for(lambda: runs.step_reached(run, 1, 2), what="a step of attempt 2")
    breakable.mend_node(run, "n2")
    finish(run, supervisor, 0)
    assert [dp for _, dp in shapes(run)] == [5, 4, 5]
    record = read_record(run)
    assert [attempt.outcome for attempt in record.attempts] == ["failed", "stopped", "completed"]
    assert record.attempts[1].cause == "step_up"
    gain = "back and fit: n2; the run steps up to the planned layout"
    assert [event.payload.reason for event in runs.events(run, "decided")][1] == gain
    # It left after a save, and what it had done until then was saved: nothing is done again.
    steps = [(event.attempt, event.payload.step) for event in runs.events(run, "step_finished")]
    last = max(step for attempt, step in steps if attempt == 2)
    assert min(step for attempt, step in steps if attempt == 3) == last + 1
    commits = [event.payload.step for event in runs.events(run, "checkpoint_committed") if event.attempt == 2]
    assert len(commits) >= 2 and commits[-2] % 4 == 0 and commits[-1] == last
    assert not runs.events(run, "found")[1:]


def test_steps_up_back_off() -> None:
    def up(ended: float) -> AttemptRecord:
        return AttemptRecord(number=1, started=0.0, ended=ended, outcome="stopped", cause="step_up")

    failed = AttemptRecord(number=1, started=0.0, ended=99.0, outcome="failed", cause="hang")
    assert may_restart_for_gain([failed], 100.0, 60.0)
    assert not may_restart_for_gain([up(100.0)], 159.0, 60.0)
    assert may_restart_for_gain([up(100.0), failed], 160.0, 60.0)
    assert may_restart_for_gain([up(1e9)], 160.0, 60.0), "noted while a clock was wrong"
    twice = [up(100.0), up(200.0)]
    assert not may_restart_for_gain(twice, 319.0, 60.0) and may_restart_for_gain(twice, 320.0, 60.0)


def test_a_node_in_quarantine_is_not_taken_up(make: Callable[..., RunDir]) -> None:
    run = make(*FIVE, steps=8, step_seconds=0.3, die={"rank": 2, "step": 5, "attempts": [2]})
    supervisor = breakable.supervise(run)
    wait_for_attempt(run, 1)
    lose(run, "n2", at=2)
    wait_for_attempt(run, 2)
    (run.path / "down" / "n2").unlink(missing_ok=True)
    finish(run, supervisor, 0)
    assert [dp for _, dp in shapes(run)] == [5, 4, 4]


def test_nothing_fits_on_the_nodes_left(make: Callable[..., RunDir]) -> None:
    stages = ("parallel.dp=1", "parallel.tp=1", "parallel.pp=2", "batch.micro=1")
    run = make(*stages, "faults.node_loss_budget=0.5", nodes=2, steps=9, step_seconds=0.3)
    supervisor = breakable.supervise(run)
    wait_for_attempt(run, 1)
    lose(run, "n2", at=2)
    message = finish(run, supervisor, 93)
    assert message.startswith(
        "1 of 2 nodes are left, and no layout of the ladder fits on 1 node (lost: n2); newest checkpoint: "
    )


def test_the_run_waits_for_a_node_where_the_profile_allows(make: Callable[..., RunDir]) -> None:
    stages = ("parallel.dp=1", "parallel.tp=1", "parallel.pp=2", "batch.micro=1")
    patient = ("faults.node_loss_budget=0.5", "cluster.failures.wait_for_node=2m")
    run = make(*stages, *patient, nodes=2, steps=9, step_seconds=0.3)
    supervisor = breakable.supervise(run, quarantine=0.2)
    wait_for_attempt(run, 1)
    lose(run, "n2", at=2)
    said = "waiting for nodes to come back, for at most 2 min 00 s"
    runs.wait_for(
        lambda: any(said in event.payload.message for event in runs.events(run, "notice")), what="the wait"
    )
    breakable.mend_node(run, "n2")
    finish(run, supervisor, 0)
    assert [nodes for nodes, _ in shapes(run)] == ["n1 n2", "n1 n2"]
