"""The run survives SIGKILL of a rank, of the agent and of the supervisor at any step: it ends with the very
weights of an uninterrupted run, and nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder
from llmtrain.run.record import read_record
from tests.support import launches
from tests.support import stand_in_runs as runs

pytestmark = pytest.mark.e2e

VICTIMS = ("rank", "agent", "supervisor", "rank", "launcher")
NOTICED_SECONDS = 2.0
TRIALS = 20
WIDE_TRIALS = (6, 13)
"""Trials with all eight ranks; the others take four, to save time."""

Weights = dict[tuple[str, ...], dict[str, str]]


@dataclass(frozen=True)
class Trial:
    """What is killed, and when."""

    seed: int

    @property
    def overrides(self) -> tuple[str, ...]:
        return launches.EIGHT_RANKS if self.seed in WIDE_TRIALS else launches.FOUR_RANKS

    def draw(self) -> tuple[str, int, int, float]:
        """Victim, rank, step that is finished when it dies, seconds after that."""
        chance = random.Random(self.seed)
        ranks = 8 if self.seed in WIDE_TRIALS else 4
        victim = VICTIMS[self.seed % len(VICTIMS)]
        return victim, chance.randrange(ranks), chance.randint(1, launches.STEPS - 4), chance.uniform(0, 0.03)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One storage folder for all, so that they share the corpus."""
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Weights:
    """Final weights of uninterrupted runs, by layout."""
    found = {}
    for name, layout in (("four", launches.FOUR_RANKS), ("eight", launches.EIGHT_RANKS)):
        run = RunDir(folder / name)
        launches.end(launches.launch(run, *layout, home=folder), 0)
        found[layout] = launches.weights(run)
    return found


@pytest.fixture
def run(folder: Path, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    run = RunDir(folder / f"trial-{request.node.callspec.params['trial'].seed}")
    yield run
    runs.clean_up(run)


@pytest.mark.parametrize("trial", [Trial(seed) for seed in range(TRIALS)], ids=lambda trial: str(trial.seed))
def test_kill(trial: Trial, run: RunDir, folder: Path, undisturbed: Weights) -> None:
    victim, rank, step, delay = trial.draw()
    command = launches.launch(run, *trial.overrides, home=folder)
    runs.wait_for(lambda: runs.events(run, "restored"), 120, "the ranks to start")
    pid = pid_of(victim, run, rank)
    runs.wait_for(lambda: runs.step_reached(run, step), 60, f"step {step}")
    time.sleep(delay)
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)
    if victim == "supervisor":
        launches.end(command, 128 + signal.SIGKILL)
        command = launches.start(folder, "resume", str(run.path), home=folder)
    launches.end(command, 0)
    check_noticed(run, victim, rank, killed_at)
    assert launches.weights(run) == undisturbed[trial.overrides]
    runs.assert_nothing_left(run)


def pid_of(victim: str, run: RunDir, rank: int) -> int:
    if victim == "rank":
        return runs.rank_pid(run, rank)
    if victim == "agent":
        return runs.agent_pid(run)
    if victim == "launcher":
        return psutil.Process(runs.agent_pid(run)).children()[0].pid
    holder = read_holder(run)
    assert holder is not None
    return holder.process.pid


def check_noticed(run: RunDir, victim: str, rank: int, killed_at: float) -> None:
    """The kill hit a running attempt, was seen in time, and was called by its name."""
    first = read_record(run).attempts[0]
    if victim == "supervisor":
        assert first.outcome == "abandoned"
        return
    [found] = runs.events(run, "found")
    assert found.time - killed_at < NOTICED_SECONDS
    names = {"rank": "rank_dead", "agent": "agent_lost", "launcher": "launcher_failed"}
    assert found.payload.finding == names[victim]
    assert victim != "rank" or found.payload.rank == rank
