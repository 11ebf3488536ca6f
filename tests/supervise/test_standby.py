"""Ranks in standby: started while an attempt trains, let go by a restart on the same nodes, else ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from llmtrain.agent import room
from llmtrain.agent.sweep import leftovers
from llmtrain.events.records import AttemptState
from llmtrain.events.state import RunState
from llmtrain.run.layout import RunDir
from llmtrain.run.markers import STANDBY_MARKER
from llmtrain.run.record import read_record
from llmtrain.supervise.attempts.standby import StandbySettings, is_due
from llmtrain.supervise.stop import ask_to_stop
from tests.support import breakable
from tests.support import stand_in_runs as runs

AT_ONCE = ("faults.standby_after=0s",)
BUDGET = ("faults.node_loss_budget=0.5",)
STEPS = 2000
"""More than any test waits for, so that standby is worth its start."""
SETTINGS = StandbySettings(is_wanted=True, after=30.0, steps=1000)


def stop(run: RunDir, supervisor: subprocess.Popen[bytes]) -> None:
    """End a run in order."""
    ask_to_stop(run)
    assert supervisor.wait(90) == 75, run.supervisor_log.read_text()


def waiting_ranks(run: RunDir) -> list[int]:
    """Pids of ranks in standby that have got as far as to wait."""
    found = []
    for process in leftovers(run.path):
        try:
            is_rank = "rank" in process.cmdline()
            if is_rank and STANDBY_MARKER in process.environ():
                found.append(process.pid)
        except psutil.Error:
            continue
    return sorted(found)


def test_restart_uses_the_ranks_that_wait(make: Callable[..., RunDir]) -> None:
    run = make(overrides=AT_ONCE, steps=STEPS, step_seconds=0.2)
    supervisor = runs.supervise(run)
    waiting = runs.wait_for(lambda: len(found := waiting_ranks(run)) == 2 and found, what="standby")
    assert run.attempt_numbers() == [1], "nothing of an attempt exists before it begins"
    os.kill(runs.rank_pid(run, 1), signal.SIGKILL)
    runs.wait_for(lambda: runs.events(run, "rank_started")[-1].attempt == 2, what="attempt 2")
    runs.wait_for(lambda: len(runs.events(run, "rank_started")) == 4, what="all its ranks")
    second = [event.payload.pid for event in runs.events(run, "rank_started") if event.attempt == 2]
    assert sorted(second) == waiting
    stop(run, supervisor)
    ends = [(attempt.outcome, attempt.cause) for attempt in read_record(run).attempts]
    assert ends == [("failed", "rank_dead"), ("stopped", "")]
    assert run.attempt(2).node_log(0).exists() and not run.attempt(1).standby_log(0).exists()
    runs.assert_nothing_left(run)


def test_standby_that_dies_costs_nothing(make: Callable[..., RunDir]) -> None:
    run = make(overrides=AT_ONCE, steps=STEPS, step_seconds=0.2)
    supervisor = runs.supervise(run)
    waiting = runs.wait_for(lambda: len(found := waiting_ranks(run)) == 2 and found, what="standby")
    os.kill(waiting[0], signal.SIGKILL)  # type: ignore[index]
    runs.wait_for(lambda: not waiting_ranks(run), what="the other one to be ended")
    [said] = runs.wait_for(lambda: runs.events(run, "notice"), what="the word on it")  # type: ignore[misc]
    assert "no ranks wait in standby for a restart: " in said.payload.message
    os.kill(runs.rank_pid(run, 0), signal.SIGKILL)
    runs.wait_for(lambda: runs.events(run, "rank_started")[-1].attempt == 2, what="attempt 2")
    stop(run, supervisor)
    assert [attempt.number for attempt in read_record(run).attempts] == [1, 2]
    runs.assert_nothing_left(run)


def test_standby_ends_with_the_run(make: Callable[..., RunDir]) -> None:
    run = make(overrides=AT_ONCE, steps=STEPS, step_seconds=0.2)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: waiting_ranks(run), what="standby")
    stop(run, supervisor)
    assert run.attempt_numbers() == [1]
    assert not leftovers(run.path), "the supervisor ended them before it left"


def test_standby_does_not_outlive_a_killed_supervisor(make: Callable[..., RunDir]) -> None:
    run = make(overrides=AT_ONCE, steps=STEPS, step_seconds=0.2)
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: len(waiting_ranks(run)) == 2, what="standby")
    supervisor.kill()
    runs.assert_nothing_left(run, seconds=30.0)
    assert run.attempt_numbers() == [1]


def test_standby_on_a_lost_node_is_replaced_by_a_cold_start(tmp_path: Path, corpus: Path) -> None:
    spec = breakable.several_nodes(
        tmp_path, "parallel.dp=2", "parallel.tp=1", "parallel.pp=1", *AT_ONCE, *BUDGET, nodes=3, spares=1
    )
    run = breakable.make_run(tmp_path / "run", spec, steps=STEPS, step_seconds=0.2)
    runs.use_corpus(run, corpus)
    supervisor = breakable.supervise(run)
    try:
        runs.wait_for(lambda: len(waiting_ranks(run)) == 2, what="standby")
        breakable.break_node(run, "n2")
        runs.wait_for(lambda: runs.events(run, "rank_started")[-1].attempt == 2, 90, "attempt 2")
        stop(run, supervisor)
        first, second = read_record(run).attempts
        assert (first.nodes, second.nodes) == (("n1", "n2"), ("n1", "n3"))
        runs.assert_nothing_left(run)
    finally:
        runs.clean_up(run)


@pytest.mark.parametrize(
    ("changes", "running", "due"),
    [
        ({}, 31.0, True),
        ({}, 29.0, False),
        ({"steps_seen": 2}, 31.0, False),
        ({"last_step": 995}, 31.0, False),
        ({"number": 2}, 31.0, False),
    ],
)
def test_when_standby_is_due(changes: dict[str, int], running: float, due: bool) -> None:
    attempt = AttemptState(number=1, first_step=1, last_step=10, steps_seen=10, step_seconds=10.0)
    state = RunState(attempts=(replace(attempt, **changes),))  # type: ignore[arg-type]
    assert is_due(state, 1, SETTINGS, running) is due
    assert not is_due(state, 1, replace(SETTINGS, is_wanted=False), running)


def test_no_room_is_said_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.no_room_for(1_000_000).startswith("the machine has ")
    group = tmp_path / "job"
    group.mkdir()
    (group / "memory.max").write_text(f"{4 << 30}\n")
    (group / "memory.current").write_text(f"{3 << 30}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 20}\n")
    monkeypatch.setattr(room, "cgroups_of", lambda: [group])
    assert room.no_room_for(1) == ""
    assert "its control group has 1.1 GB of 4.3 GB memory free, 8 ranks" in room.no_room_for(8)
