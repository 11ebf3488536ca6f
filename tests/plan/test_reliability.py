"""Checkpoint interval, goodput and spares against simulation and hand-made sums."""

from __future__ import annotations

import random
from math import sqrt

import pytest

from llmtrain.plan.make import make_plan
from llmtrain.plan.reliability import checkpoint_interval, goodput, spares_needed
from tests.support.plans import a100, spec


def simulated_goodput(save: float, between: float, interval: float, restart: float) -> float:
    """Play failures with exponential gaps: work in stretches of `interval`, each ended by a save."""
    rng = random.Random(7)
    wanted, clock, done = 20_000 * interval, 0.0, 0.0
    next_failure = rng.expovariate(1 / between)
    while done < wanted:
        end = clock + interval + save
        if next_failure >= end:
            clock, done = end, done + interval
            continue
        clock = next_failure
        next_failure = clock + rng.expovariate(1 / between)
        end = clock + restart
        while next_failure < end:  # a failure during the restart starts it anew
            clock = next_failure
            next_failure = clock + rng.expovariate(1 / between)
            end = clock + restart
        clock = end
    return wanted / clock


@pytest.mark.parametrize(
    ("save", "between", "restart"), [(60, 20_000, 300), (120, 4000, 600), (5, 50_000, 60)]
)
def test_goodput_is_what_a_simulation_measures(save, between, restart):
    interval = checkpoint_interval(save, between)
    expected = simulated_goodput(save, between, interval, restart)
    assert goodput(save, between, interval, restart) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("save", "between"), [(60, 20_000), (300, 5000), (1, 1e6)])
def test_no_other_interval_is_better(save, between):
    best = checkpoint_interval(save, between)
    here = goodput(save, between, best, 0.0)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert goodput(save, between, best * factor, 0.0) <= here * 1.0005


def test_it_is_young_s_rule_when_saves_are_cheap():
    assert checkpoint_interval(1.0, 1e8) == pytest.approx(sqrt(2e8), rel=1e-3)


def test_spares_cover_a_poisson_number_of_broken_nodes():
    assert spares_needed(0.0) == 0
    assert spares_needed(0.05) == 0  # e^-0.05 = 0.951
    assert spares_needed(0.06) == 1
    assert spares_needed(1.0) == 3  # P(N <= 3) = 0.981, P(N <= 2) = 0.920
    assert spares_needed(32 * 86400 / 2.16e7) == 1


def test_the_plan_tells_the_finish_and_the_price():
    plan = make_plan(spec(where=a100(gpu_hour_price=2.0)))
    told = plan.reliability
    assert 0.9 < told.goodput < 1.0
    assert told.days == pytest.approx(plan.plans[0].predicted.train_days / told.goodput)
    assert told.price == pytest.approx(2.0 * (32 + told.spares) * 8 * told.days * 24)
    assert told.checkpoint_bytes == 12 * plan.model.parameters
    assert make_plan(spec()).reliability.price is None
