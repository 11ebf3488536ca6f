"""The supervisor, its agents and real processes, with a torch-free stand-in for torchrun and the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llmtrain.agent.sweep import leftovers
from llmtrain.backends.local import start_supervisor
from llmtrain.errors import UsageError
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import acquire, read_holder
from llmtrain.run.record import read_record
from llmtrain.supervise.stop import ask_to_stop
from tests.support import stand_in_runs as runs

NOTICED_SECONDS = 2.0


def finish(run: RunDir, supervisor: subprocess.Popen[bytes], status: int, seconds: float = 90.0) -> None:
    """The supervisor leaves with a status, says the same in record and events, and leaves nothing running."""
    assert supervisor.wait(seconds) == status, run.supervisor_log.read_text()
    record = read_record(run)
    assert (record.stage, record.exit_status) == ("ended", status)
    assert runs.events(run, "run_ended")[-1].payload.exit_status == status
    runs.assert_nothing_left(run)


def outcomes(run: RunDir) -> list[tuple[str, str]]:
    return [(attempt.outcome, attempt.cause) for attempt in read_record(run).attempts]


def test_run_to_the_end(make: Callable[..., RunDir]) -> None:
    run = make(steps=4)
    finish(run, runs.supervise(run), 0)
    assert outcomes(run) == [("completed", "")]
    record = read_record(run)
    assert (record.reached_step, record.committed_step) == (4, 4)
    holder = read_holder(run)
    assert holder is not None and holder.released


def test_dead_rank_is_noticed_and_the_run_restarts_from_its_checkpoint(make: Callable[..., RunDir]) -> None:
    run = make(steps=6, step_seconds=0.3)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    killed_at = time.time()
    os.kill(runs.rank_pid(run, 1), signal.SIGKILL)
    finish(run, supervisor, 0)
    [found] = runs.events(run, "found")
    assert found.time - killed_at < NOTICED_SECONDS
    assert (found.payload.finding, found.payload.rank) == ("rank_dead", 1)
    assert "SIGKILL (exit code 137)" in found.payload.message
    assert outcomes(run) == [("failed", "rank_dead"), ("completed", "")]
    restored = [event.payload.step for event in runs.events(run, "restored")]
    assert restored[0] == 0 and restored[1] in (2, 4)
    [first, second] = runs.events(run, "attempt_started")
    assert (first.payload.reason, second.payload.reason) == ("first", found.payload.message)


def test_last_words_of_a_rank_are_told(make: Callable[..., RunDir]) -> None:
    run = make(steps=4, die={"rank": 1, "step": 2})
    finish(run, runs.supervise(run), 0)
    [found] = runs.events(run, "found")
    assert "its last words: last words of a dying rank" in found.payload.message


@pytest.mark.parametrize("victim", ["agent", "launcher"])
def test_killed_agent_or_launcher_costs_one_attempt(make: Callable[..., RunDir], victim: str) -> None:
    run = make(steps=6, step_seconds=0.3)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    agent = runs.agent_pid(run)
    killed_at = time.time()
    pid = agent if victim == "agent" else psutil.Process(agent).children()[0].pid
    os.kill(pid, signal.SIGKILL)
    finish(run, supervisor, 0)
    [found] = runs.events(run, "found")
    assert found.payload.finding == {"agent": "agent_lost", "launcher": "launcher_failed"}[victim]
    assert found.time - killed_at < NOTICED_SECONDS
    assert [outcome for outcome, _ in outcomes(run)] == ["failed", "completed"]


def test_killed_supervisor_leaves_ranks_that_save_and_leave_and_another_goes_on(
    make: Callable[..., RunDir],
) -> None:
    run = make(steps=8, step_seconds=0.3)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), what="step 3")
    supervisor.kill()
    supervisor.wait()
    runs.wait_for(lambda: not leftovers(run.path), 30.0, "the ranks to save and leave")
    [*_, finished] = runs.events(run, "rank_finished")
    assert finished.payload.reason == "stopped"
    again = runs.supervise(run)
    finish(run, again, 0)
    assert outcomes(run) == [("abandoned", ""), ("completed", "")]
    first = read_record(run).attempts[0]
    assert first.reached_step == first.committed_step == finished.payload.step
    assert runs.events(run, "attempt_ended")[0].payload.cause == "its supervisor died"
    assert runs.events(run, "restored")[-1].payload.step >= 3
    assert runs.events(run, "attempt_started")[-1].payload.reason == "resume"


def test_second_supervisor_waits_for_the_ranks_of_a_killed_one(make: Callable[..., RunDir]) -> None:
    run = make(steps=6, step_seconds=0.5)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    supervisor.kill()
    finish(run, runs.supervise(run), 0)
    old = [event.time for event in runs.events(run, "rank_finished") if event.attempt == 1]
    new = [event.time for event in runs.events(run, "attempt_started") if event.attempt == 2]
    assert len(old) == 2 and max(old) < new[0]


def test_ranks_without_agent_and_supervisor_are_ended_at_once(make: Callable[..., RunDir]) -> None:
    run = make(steps=40, step_seconds=0.3)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    agent = runs.agent_pid(run)
    os.kill(agent, signal.SIGSTOP)  # else it might ask its ranks to leave before it dies
    supervisor.kill()
    supervisor.wait()
    os.kill(agent, signal.SIGKILL)
    orphans = [process for process in leftovers(run.path) if process.pid != agent]
    assert len(orphans) >= 2
    (run.path / "behaviour.json").write_text('{"steps": 10}')
    again = runs.supervise(run)
    finish(run, again, 0)
    assert "killed leftovers" in run.supervisor_log.read_text()
    old = [event.time for event in runs.events(run) if event.attempt == 1 and event.source == "rank"]
    [started] = [event.time for event in runs.events(run, "attempt_started") if event.attempt == 2]
    assert max(old) < started


def test_second_supervisor_is_refused(make: Callable[..., RunDir]) -> None:
    run = make(steps=30, step_seconds=0.3)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 1), what="step 1")
    second = subprocess.run(
        [sys.executable, "-m", "llmtrain.supervise", str(run.path)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert second.returncode == 2
    assert f"is already supervised by pid {supervisor.pid}" in second.stderr
    assert supervisor.poll() is None
    ask_to_stop(run)
    finish(run, supervisor, 75)


@pytest.mark.parametrize("way", ["file", "signal"])
def test_stop_saves_and_is_resumable(make: Callable[..., RunDir], way: str) -> None:
    run = make(steps=9, step_seconds=0.3, checkpoint_every=100)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 3), what="step 3")
    if way == "file":
        ask_to_stop(run)
    else:
        supervisor.send_signal(signal.SIGTERM)
    finish(run, supervisor, 75)
    record = read_record(run)
    assert record.committed_step >= 3
    assert record.message.startswith(f"stopped as asked; newest checkpoint: step {record.committed_step}")
    assert not run.stop_file.exists()
    finish(run, runs.supervise(run), 0)
    assert runs.events(run, "restored")[-1].payload.step == record.committed_step


@pytest.mark.parametrize("way", ["file", "signals"])
def test_stop_now_does_not_wait_for_a_long_step(make: Callable[..., RunDir], way: str) -> None:
    run = make(steps=9, hang={"rank": 1, "step": 2})
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    if way == "file":
        ask_to_stop(run, now=True)
    else:
        supervisor.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        supervisor.send_signal(signal.SIGTERM)
    finish(run, supervisor, 75, 30.0)
    assert "without a new checkpoint: the ranks were killed at once" in read_record(run).message


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(make: Callable[..., RunDir]) -> None:
    run = make(steps=50, step_seconds=0.3, ignore_term=True)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 1), what="step 1")
    asked = time.monotonic()
    ask_to_stop(run, grace=1.5)
    finish(run, supervisor, 75, 30.0)
    assert 1.4 < time.monotonic() - asked < 20.0
    assert "did not leave within 1.5 s and were killed" in read_record(run).message


def test_stop_before_any_rank_runs(make: Callable[..., RunDir]) -> None:
    run = make(steps=9)
    ask_to_stop(run)
    supervisor = runs.supervise(run)
    finish(run, supervisor, 75, 30.0)
    assert not runs.events(run, "rank_started")


def test_stop_while_the_node_script_starts_claims_no_wait(make: Callable[..., RunDir]) -> None:
    run = make(steps=9)
    (run.scripts / "node.sh").write_text("sleep 60\n")
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.events(run, "attempt_started"), what="the attempt")
    time.sleep(1.0)
    ask_to_stop(run)
    finish(run, supervisor, 75, 30.0)
    assert "without a new checkpoint: no rank had been started" in read_record(run).message


def test_restarts_without_progress_end_the_run(make: Callable[..., RunDir]) -> None:
    overrides = ("faults.restarts_without_progress=2",)
    die = {"rank": 0, "step": 1, "attempts": [1, 2, 3, 4, 5]}
    run = make(overrides=overrides, steps=9, die=die)
    finish(run, runs.supervise(run), 93)
    assert outcomes(run) == [("failed", "rank_dead")] * 3
    assert read_record(run).message.startswith("2 restarts in a row without a newer checkpoint")


@pytest.mark.parametrize(
    ("error_class", "status", "attempts"),
    [("config", 1, 1), ("numeric", 93, 1), ("checkpoint", 93, 1), ("user_code", 1, 2)],
)
def test_hopeless_errors_end_the_run(
    make: Callable[..., RunDir], error_class: str, status: int, attempts: int
) -> None:
    # Long steps: the other rank, which knows nothing of it, must not save the step that fails.
    run = make(
        steps=9,
        step_seconds=0.5,
        fail={"rank": 1, "step": 2, "attempts": [1, 2, 3], "class": error_class},
    )
    finish(run, runs.supervise(run), status)
    assert outcomes(run) == [("failed", "rank_failed")] * attempts
    assert "rank 1 failed in step 2: Boom: it broke" in read_record(run).message


def test_broken_node_script_ends_the_run_with_its_own_words(make: Callable[..., RunDir]) -> None:
    run = make(overrides=("faults.restarts_without_progress=1",), steps=9)
    (run.scripts / "node.sh").write_text("echo no such cluster >&2; exit 7\n")
    finish(run, runs.supervise(run), 93)
    message = read_record(run).message
    assert "left with exit code 7; last line of its log: no such cluster" in message


def test_unusable_corpus_ends_the_run_with_a_config_error(make: Callable[..., RunDir]) -> None:
    run = make(overrides=("data.corpus=/nowhere/at/all",), steps=9)
    run.data_json.unlink()
    finish(run, runs.supervise(run), 2)
    assert "/nowhere/at/all" in read_record(run).message


def test_the_slower_of_two_that_start_a_supervisor_is_told_so(make: Callable[..., RunDir]) -> None:
    """Both commands had found the lease free; the other's supervisor took it first."""
    run = make(steps=9)
    lease = acquire(run)
    with pytest.raises(UsageError, match=f"is already supervised by pid {os.getpid()} on host") as error:
        start_supervisor(run, backend="local")
    assert "llmtrain stop" in error.value.problems[0].hint
    lease.release()


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "empty")
    run.path.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain.supervise", str(run.path)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "job.json" in done.stderr
