"""Slow ranks are named within 50 steps; noise, however it comes, is not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llmtrain.config.batch_ramp import BatchRamp
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig
from llmtrain.supervise.detection.stragglers import Straggler, Stragglers, stragglers_of, work_of

WINDOW = 5
"""Steps of a mean, as the engine tells it."""
RECORDED = Path(__file__).parents[1] / "data" / "compute_times.json"
Times = Callable[[int, random.Random], float]
"""Compute seconds of a rank's next step."""


def quiet(rank: int, chance: random.Random) -> float:
    """A GPU: half a percent of jitter, and a hiccup now and then."""
    return 0.5 * chance.gauss(1.0, 0.005) + (0.1 if chance.random() < 0.002 else 0.0)


def busy(rank: int, chance: random.Random) -> float:
    """Cores that are shared: 20 % of jitter with a long tail."""
    return 0.5 * abs(chance.gauss(1.0, 0.2)) + (chance.expovariate(2.0) if chance.random() < 0.05 else 0.0)


def alike(ranks: int) -> Stragglers:
    """Ranks that all do the same work."""
    work = work_of(dict.fromkeys(range(ranks), "all"))
    return Stragglers(lambda first, last: work)


def watch(times: Times, ranks: int, steps: int, seed: int, slow: float = 0.0) -> list[Straggler]:
    """What is said over some steps in which rank 1 takes longer by a share."""
    chance = random.Random(seed)
    watched = alike(ranks)
    found: list[Straggler] = []
    for end in range(WINDOW, steps + 1, WINDOW):
        for rank in range(ranks):
            factor = 1.0 + slow * (rank == 1)
            mean = sum(times(rank, chance) for _ in range(WINDOW)) / WINDOW
            found += watched.observe(rank, end, mean * factor)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_five_percent_are_named_within_fifty_steps(ranks: int, seed: int) -> None:
    [found] = watch(quiet, ranks, 50, seed, slow=0.05)
    assert found.rank == 1
    assert found.excess == pytest.approx(0.05, abs=0.015)
    assert found.peers == ranks - 1


@pytest.mark.parametrize("times", [quiet, busy])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_clean_ranks_are_never_named(times: Times, ranks: int, seed: int) -> None:
    assert watch(times, ranks, 2000, seed) == []


def test_a_rank_is_named_once_and_again_after_it_was_well() -> None:
    chance = random.Random(0)
    watched = alike(4)
    named = []
    for window in range(120):
        is_slow = window < 40 or window >= 80
        for rank in range(4):
            seconds = quiet(rank, chance) * (1.2 if rank == 3 and is_slow else 1.0)
            named += [(each.rank, window) for each in watched.observe(rank, window * WINDOW, seconds)]
    (first, early), (second, late) = named
    assert (first, second) == (3, 3) and early < 12 and 80 <= late < 95


def test_only_ranks_with_the_same_work_are_compared() -> None:
    """The last stage has the loss to compute besides; with three replicas, one has a micro-batch more."""
    layout = Layout(dp=2, tp=1, pp=2, micro_batch=1)
    watched = stragglers_of(layout, BatchConfig(global_size=5))
    seconds = {0: 1.0, 1: 2.0, 2: 1.3, 3: 2.6}
    for window in range(40):
        for rank in range(4):
            assert watched.observe(rank, window * WINDOW, seconds[rank]) == []


def ramped(steps: int, slow: float) -> list[Straggler]:
    """Four replicas while the batch grows from four to twelve sequences, one at a time: the first ones get
    one more. Rank 3 takes longer by a share."""
    layout, chance = Layout(dp=4, micro_batch=1), random.Random(1)
    batch = BatchConfig(global_size=12, ramp=BatchRamp(start=4, steps=steps, increment=1))
    watched, found = stragglers_of(layout, batch), []
    for end in range(WINDOW, 2 * steps + 1, WINDOW):
        window = range(end - WINDOW + 1, end + 1)
        for rank in range(4):
            work = sum(layout.micro_batches(batch.at(step))[rank] for step in window) / WINDOW
            seconds = work * quiet(rank, chance) * (1.0 + slow * (rank == 3))
            found += watched.observe(rank, end, seconds, WINDOW)
    return found


@pytest.mark.parametrize("steps", [37, 400, 1600])
def test_a_growing_batch_makes_no_rank_slow(steps: int) -> None:
    assert ramped(steps, slow=0.0) == []
    assert {found.rank for found in ramped(steps, slow=0.06)} == {3}


def test_a_bad_moment_of_some_windows_is_no_slow_rank() -> None:
    """As seen on a machine with other work to do: a core that others used for three seconds."""
    watched = alike(2)
    for window, factor in enumerate([1.02, 0.97, 1.04, 1.065, 1.16, 1.2, 1.14, 1.16, 1.0, 0.99] * 20):
        assert watched.observe(0, window * WINDOW, 0.105 * factor) == []
        assert watched.observe(1, window * WINDOW, 0.105) == []


def test_a_rank_that_lacks_a_core_is_named_only_when_that_lasts_for_minutes() -> None:
    chance, watched, named = random.Random(2), alike(4), []
    for window in range(1, 1500):
        for rank in range(4):
            waited = 0.1 * (rank == 2)
            seconds = quiet(rank, chance) + waited
            found = watched.observe(rank, window * WINDOW, seconds, WINDOW, waited)
            named += [(each.rank, window * WINDOW * 0.6) for each in found]
    [(rank, seconds)] = named
    assert rank == 2 and 8 * 60.0 <= seconds < 12 * 60.0


def crowded(slow: float, steps: int, seed: int) -> list[Straggler]:
    """Four ranks that wait for a core for most of every step; rank 1 needs some seconds more than the others.
    As measured, the waits hold some in collectives, too, so that a little too much is taken off."""
    chance, watched, named = random.Random(seed), alike(4), []
    for end in range(WINDOW, steps + 1, WINDOW):
        for rank in range(4):
            own = abs(chance.gauss(0.012, 0.003)) + slow * (rank == 1)
            waited = 0.3 * abs(chance.gauss(1.0, 0.06))
            named += watched.observe(rank, end, own + waited, WINDOW, waited * chance.uniform(1.0, 1.04))
    return named


@pytest.mark.parametrize("seed", range(3))
def test_what_all_wait_for_cores_hides_no_slow_rank_and_makes_none(seed: int) -> None:
    assert {found.rank for found in crowded(0.2, 100, seed)} == {1}
    assert crowded(0.0, 2000, seed) == []


def test_lost_and_odd_reports_do_no_harm() -> None:
    watched = alike(2)
    for step in range(1, 200):
        assert watched.observe(0, step, 1.0) == []
    assert watched.observe(1, 199, float("nan")) == watched.observe(1, 199, 0.0) == []
    assert len(watched._open) <= 4


@pytest.mark.skipif(not RECORDED.exists(), reason="nothing was recorded")
def test_no_alarm_in_recorded_steps_of_crowded_cores() -> None:
    """Four ranks, two stages, on two cores that eight builds shared: the real thing, in its real order."""
    recorded: Sequence[Sequence[float]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    watched = stragglers_of(Layout(dp=2, tp=1, pp=2, micro_batch=1), BatchConfig(global_size=8))
    named = [
        found
        for window, times in enumerate(recorded)
        for rank, seconds in enumerate(times)
        for found in watched.observe(rank, window * WINDOW, seconds)
    ]
    assert named == []


def uneven(rank: int, chance: random.Random) -> float:
    """Cores that are shared now and then: a quarter of jitter a step."""
    return 0.5 * abs(chance.gauss(1.0, 0.25))


def test_a_rank_that_takes_twice_as_long_is_named_in_noise_too() -> None:
    assert {found.rank for found in watch(uneven, 4, 200, 0, slow=1.0)} == {1}
