"""The checkpoint interval of a run: the default, what it follows, and its bounds."""

from __future__ import annotations

from math import sqrt

import pytest

from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.events.saving import SaveIntervalSet, interval_text
from llmtrain.events.schema import Payload
from llmtrain.plan.reliability import goodput
from llmtrain.plan.save_interval import LONGEST, SHORTEST, UNMEASURED, between_failures, save_interval
from llmtrain.run.record import AttemptRecord
from llmtrain.supervise.decision.failure_rate import expected_between

DAY = 86400.0


def test_half_an_hour_until_something_is_known() -> None:
    assert UNMEASURED == 1800.0
    assert save_interval([], [], 3 * DAY) == save_interval([1.0], [2.0], 0.0) == UNMEASURED
    assert save_interval([], [], 1200.0) == 300.0, "a run that fails every 20 minutes must come to a save"
    assert save_interval([], [], 10.0) == SHORTEST


def test_it_follows_young_and_daly_inside_its_bounds() -> None:
    assert save_interval([1.0], [5.0], 8 * DAY) == pytest.approx(sqrt(2 * 8 * DAY), rel=0.01)
    assert save_interval([0.0, 0.0], [1.0, 1.0], 8 * DAY) == SHORTEST
    assert save_interval([0.0], [200.0], 8 * DAY) == 600.0, "no save meets the one before"
    assert save_interval([60.0], [60.0], 3000 * DAY) == LONGEST
    best = save_interval([4.0], [20.0], DAY)
    here = goodput(4.0, DAY, best, 60.0)
    assert all(goodput(4.0, DAY, best * factor, 60.0) <= here for factor in (0.5, 0.8, 1.25, 2.0))


def test_the_profile_s_failure_rate_gives_way_to_the_run_s_own() -> None:
    profile = 250 * DAY
    assert between_failures(profile, 32, 0, 0.0) == profile / 32
    assert between_failures(profile, 32, 0, 30 * DAY) > profile / 32, "a quiet month"
    assert between_failures(profile, 1, 4, 3600.0) == 1800.0, "four failures in an hour: less a deviation"
    many = between_failures(profile, 32, 900, 900 * 3600.0)
    assert many == pytest.approx(3600.0, rel=0.05)
    rates = [between_failures(profile, 32, count, DAY) for count in range(12)]
    assert rates == sorted(rates, reverse=True)


def attempt(number: int, outcome: str, seconds: float, step: int = 5) -> AttemptRecord:
    return AttemptRecord(
        number=number,
        started=100.0,
        ended=100.0 + seconds,
        outcome=outcome,
        reached_step=step,
    )


def test_attempts_that_trained_count() -> None:
    told = [attempt(1, "failed", 900.0), attempt(2, "stopped", 2700.0), attempt(3, "failed", 5.0, step=0)]
    assert expected_between(told, DAY, 1) == between_failures(DAY, 1, 1, 3600.0)
    assert expected_between([], DAY, 4) == DAY / 4


@pytest.mark.engine
def test_the_timer_says_which_interval_and_where_it_comes_from() -> None:
    from llmtrain.engine.save_timer import REMEMBERED, SaveTimer

    told: list[SaveIntervalSet] = []

    def tell(payload: Payload) -> None:
        assert isinstance(payload, SaveIntervalSet)
        told.append(payload)

    timer = SaveTimer(CheckpointConfig(), 8 * DAY, tell)
    timer.tell()
    assert (timer.interval, told.pop().source) == (UNMEASURED, "default")
    for _ in range(3):
        timer.saved(1.0, 5.0)
    assert timer.interval == save_interval([1.0], [5.0], 8 * DAY)
    [measured] = told
    assert (measured.source, measured.seconds, measured.stall_seconds) == ("measured", timer.interval, 1.0)
    assert interval_text(None, measured.seconds) == "every 19 min 35 s"
    for _ in range(REMEMBERED):
        timer.saved(1.2, 5.0)
    assert len(told) == 1, "hardly another interval is not worth a change"
    for _ in range(REMEMBERED):
        timer.saved(9.0, 5.0)
    assert told[-1].seconds == timer.interval > 2 * measured.seconds
    assert SaveTimer(CheckpointConfig(), 900.0, tell).interval == 225.0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("config", "seconds", "source", "text"),
    [
        (CheckpointConfig(every=90.0), 90.0, "fixed", "every 1 min 30 s"),
        (CheckpointConfig(every=0.0), 0.0, "fixed", "only at the end"),
        (CheckpointConfig(every=0.0, every_steps=50), 0.0, "fixed", "every 50 steps"),
        (CheckpointConfig(every_steps=100), UNMEASURED, "default", "every 100 steps and every 30 min 00 s"),
    ],
)
def test_fixed_intervals_stay(config: CheckpointConfig, seconds: float, source: str, text: str) -> None:
    from llmtrain.engine.save_timer import SaveTimer

    told: list[Payload] = []
    timer = SaveTimer(config, 8 * DAY, told.append)
    timer.tell()
    timer.saved(1.0, 5.0)
    [only] = told
    assert isinstance(only, SaveIntervalSet)
    assert (timer.interval, only.seconds, only.source) == (seconds, seconds, source)
    assert interval_text(only.every_steps, only.seconds) == text
