"""Schedules idle as much as their formulas say: played by their order, and measured from traces of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.engine.parallel.zero_bubble import INPUT, WEIGHT, zero_bubble_order
from llmtrain.plan.timing.schedules import bubble_ratio, micro_batches_in_flight
from tests.bench.bubble import SCHEDULES, measure

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4), (4, 8), (4, 32), (8, 9), (2, 3), (4, 2)])
def test_the_zero_bubble_order(stages: int, micro_batches: int) -> None:
    """One time unit a pass; every pass waits for those that it needs."""
    orders = [zero_bubble_order(stages, stage, micro_batches) for stage in range(stages)]
    done: dict[tuple[str, int, int], int] = {}
    clocks, places = [0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                what, index = order[places[stage]]
                last = stage == stages - 1
                needed = {
                    INPUT: ("I", stage + 1, index) if not last else ("F", stage, index),
                    WEIGHT: ("I", stage, index),
                }.get(what, ("F", stage - 1, index) if stage else None)
                if needed is not None and needed not in done:
                    break
                clocks[stage] = max(clocks[stage], done[needed] if needed else 0) + 1
                done[what.value, stage, index] = clocks[stage]
                places[stage] += 1
        assert places != before, "deadlock"
    assert sorted(done) == sorted(
        (w, s, i) for w in "FIW" for s in range(stages) for i in range(micro_batches)
    )
    idle = 1 - 3 * micro_batches / max(clocks)
    if micro_batches >= stages:
        assert idle == pytest.approx(bubble_ratio("zero-bubble", stages, 1, micro_batches))
    for stage, order in enumerate(orders):
        alive = peak = 0
        for what, _ in order:
            alive += {WEIGHT: -1, INPUT: 0}.get(what, 1)
            peak = max(peak, alive)
        assert peak == micro_batches_in_flight("zero-bubble", stages, 1, micro_batches, stage)


def test_schedules_measured_from_traces(tmp_path: Path) -> None:
    """The whole table is `python -m tests.bench.bubble`; here with short passes, so with a wide margin."""
    runs = [
        (replace(SCHEDULES["1f1b"], micro_batch=1), 4),
        (replace(SCHEDULES["interleaved"], micro_batch=1), 4),
        (replace(SCHEDULES["zero-bubble"], micro_batch=1), 5),
    ]
    for (layout, _), (measured, formula) in zip(runs, measure(runs, 0.15, tmp_path), strict=True):
        assert measured == pytest.approx(formula, abs=0.05), layout.schedule
