"""Learning rates and batch sizes of every step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.config.batch_ramp import BatchRamp, batch_at, samples_before, steps_for
from llmtrain.config.numerics import LearningRateConfig
from llmtrain.engine.schedule import learning_rate


@pytest.mark.parametrize(
    ("decay", "step", "expected"),
    [
        ("linear", 5, 0.5),
        ("linear", 10, 1.0),
        ("linear", 80, 1.0),
        ("linear", 90, 0.6),
        ("linear", 100, 0.2),
        ("linear", 120, 0.2),
        ("sqrt", 85, 0.6),  # a quarter of the way: half down
        ("sqrt", 100, 0.2),
        ("cosine", 90, 0.6),
        ("cosine", 100, 0.2),
    ],
)
def test_warmup_stable_decay(decay: str, step: int, expected: float) -> None:
    config = LearningRateConfig(
        peak=1.0, final=0.2, warmup_steps=10, schedule="wsd", decay_steps=20, decay=decay
    )
    assert learning_rate(config, step, 100) == pytest.approx(expected)


def test_the_default_decay_is_a_tenth() -> None:
    config = LearningRateConfig(peak=1.0, schedule="wsd")
    rates = [learning_rate(config, step, 200) for step in range(1, 201)]
    assert rates[:180] == [1.0] * 180
    assert rates[180:] == sorted(rates[180:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_ramp_grows_in_equal_stages() -> None:
    ramp = BatchRamp(start=4, steps=9)
    assert [batch_at(ramp, 16, step) for step in range(1, 12)] == [4, 4, 4, 8, 8, 8, 12, 12, 12, 16, 16]
    uneven = BatchRamp(start=4, increment=8, steps=5)
    assert [batch_at(uneven, 16, step) for step in range(1, 7)] == [4, 4, 4, 12, 12, 16]


@given(
    start=st.integers(1, 20),
    increment=st.none() | st.integers(1, 20),
    extra=st.integers(1, 60),
    steps=st.integers(1, 80),
    samples=st.integers(0, 4000),
)
def test_samples_are_consecutive_whatever_the_ramp(
    start: int, increment: int | None, extra: int, steps: int, samples: int
) -> None:
    final = start + extra
    ramp = BatchRamp(
        start=start, increment=increment, steps=max(steps, len(range(start, final, increment or start)))
    )
    total = 0
    for step in range(1, ramp.steps + 10):
        assert samples_before(ramp, final, step) == total
        assert start <= batch_at(ramp, final, step) <= final
        total += batch_at(ramp, final, step)
    needed = steps_for(ramp, final, samples)
    assert samples_before(ramp, final, needed + 1) >= samples
    assert needed == 0 or samples_before(ramp, final, needed) < samples


def test_without_a_ramp_nothing_changes() -> None:
    assert (batch_at(None, 8, 3), samples_before(None, 8, 3), steps_for(None, 8, 17)) == (8, 16, 3)
