"""A real rank that takes five percent longer is named, and nobody is before.

What tells a slow rank is the time that it computes. On a few cores that others use too, that time is mostly
the others'; so here all ranks sleep for most of every step, the slow one a little longer, and what they do
besides goes before all else on the machine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from llmtrain.events.schema import AttemptStarted
from llmtrain.events.watching import SlowRank
from llmtrain.run.layout import RunDir
from tests.support import launches
from tests.support import stand_in_runs as runs

pytestmark = [pytest.mark.e2e, pytest.mark.quiet]

CLEAN_STEPS = int(os.environ.get("LLMTRAIN_CLEAN_STEPS", "20"))
"""Steps before the slow ones."""
CAMPAIGN = 1000
"""From so many on, ranks without any sleep are watched, too."""
NAMED_WITHIN = 50
"""Steps from the first slow one."""
SLEEP, EXCESS = 0.24, 0.05
STEP = 0.25
"""About what a step takes, seconds."""
VICTIM = 1
LAST_STEP = 100_000
TWO_REPLICAS = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1")
PRIORITY = 1
"""Of the lowest real-time class: before all ordinary processes."""


def slow(rank: int, step: int, seconds: float) -> str:
    return f"{{kind: slow, rank: {rank}, step: {step}, steps: {LAST_STEP}, seconds: {seconds}}}"


def prefer(pid: int) -> None:
    """Let all threads of a process go before other processes, where that is allowed."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(PRIORITY))


def named(run: RunDir) -> list[SlowRank]:
    found = [event.payload for event in runs.events(run, "slow_rank")]
    return [payload for payload in found if isinstance(payload, SlowRank)]


def test_five_percent_are_named_within_fifty_steps_and_nothing_before(run: RunDir, tmp_path: Path) -> None:
    first = CLEAN_STEPS + 1
    faults = [*(slow(rank, 1, SLEEP) for rank in range(2)), slow(VICTIM, first, EXCESS * STEP)]
    command = launches.launch(
        run,
        *TWO_REPLICAS,
        "checkpoint.every_steps=100000",
        "faults.standby=false",
        f"faults.inject=[{', '.join(faults)}]",
        f"train.steps={first + NAMED_WITHIN}",
        home=tmp_path,
    )
    runs.wait_for(lambda: runs.step_reached(run, 2), 240, "steps")
    for rank in range(2):
        prefer(runs.rank_pid(run, rank))
    launches.end(command, 0, 240.0 + 2 * STEP * (first + NAMED_WITHIN))
    [found] = named(run)
    assert (found.rank, found.peers) == (VICTIM, 1)
    assert first < found.step <= first + NAMED_WITHIN
    assert EXCESS - 0.02 < found.excess < EXCESS + 0.02
    [started] = [event.payload for event in runs.events(run, "attempt_started")]
    assert isinstance(started, AttemptStarted) and (found.node,) == started.nodes


if CLEAN_STEPS >= CAMPAIGN:

    def test_ranks_that_share_cores_are_not_named(run: RunDir, tmp_path: Path) -> None:
        """Steps of milliseconds, four ranks, and whatever else this machine does."""
        command = launches.launch(
            run,
            *launches.FOUR_RANKS,
            "checkpoint.every_steps=500",
            "data.validation_every=100",
            f"train.steps={CLEAN_STEPS}",
            home=tmp_path,
        )
        launches.end(command, 0, 3600.0)
        assert named(run) == []
        assert len(runs.events(run, "rank_step")) >= 4 * CLEAN_STEPS // 5
