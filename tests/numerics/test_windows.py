"""Spikes against median and MAD; percentiles and the clipping threshold."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from llmtrain.config.numerics import ClipConfig, SpikeConfig
from llmtrain.engine.numerics.windows import clip_factor, clip_threshold, find_spike, percentile, pushed

CONFIG = SpikeConfig(window=32)
NOISE = [3.0 + 0.01 * ((7 * step) % 11 - 5) for step in range(32)]
"""Median 3.0, MAD 0.03."""


@pytest.mark.parametrize(
    ("quantity", "value", "recent", "is_spike"),
    [
        ("loss", 3.05, NOISE, False),
        ("loss", 3.35, NOISE, False),  # inside 8 deviations of 0.0445
        ("loss", 3.37, NOISE, True),
        ("loss", 1.0, NOISE, False),  # down is good
        ("loss", 9.0, NOISE[:31], False),  # too few to say
        ("loss", 3.1, [3.0] * 32, False),  # no noise at all: at least 5 % above
        ("loss", 3.2, [3.0] * 32, True),
        ("grad_norm", 0.9, [0.5] * 32, False),  # at least twice the median
        ("grad_norm", 1.1, [0.5] * 32, True),
        ("loss", 3.9, [*NOISE[:20], *[50.0] * 12], True),  # a third of outliers does not blind it
    ],
)
def test_spikes(quantity: str, value: float, recent: list[float], is_spike: bool) -> None:
    assert (find_spike(quantity, value, recent, CONFIG) is not None) == is_spike


def test_off_finds_none() -> None:
    assert find_spike("loss", 100.0, NOISE, SpikeConfig(action="off", window=32)) is None


def test_noise_and_a_falling_loss_raise_no_alarm() -> None:
    draw = random.Random(1)
    recent: tuple[float, ...] = ()
    config, alarms = SpikeConfig(), 0
    for step in range(5000):
        loss = 2.0 + 3.0 * math.exp(-step / 100) + draw.gauss(0.0, 0.05)
        alarms += find_spike("loss", loss, recent, config) is not None
        recent = pushed(recent, loss, config.window)
    assert len(recent) == config.window
    assert alarms == 0


@pytest.mark.parametrize("percent", [0, 10, 33.3, 50, 90, 99, 100])
def test_percentile_is_numpys(percent: float) -> None:
    draw = random.Random(3)
    values = [draw.gauss(1.0, 0.3) for _ in range(37)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([], 1.0),
        ([0.3] * 9, 1.0),  # too few
        ([0.3] * 10, 0.3),
        ([0.01] * 50, 0.1),  # not below the lowest
        ([7.0] * 50, 1.0),  # not above the highest
        ([0.2] * 89 + [0.9] * 11, 0.9),
        ([0.2] * 95 + [0.9] * 5, 0.2),
    ],
)
def test_adaptive_threshold(norms: list[float], expected: float) -> None:
    assert clip_threshold(ClipConfig(percentile=90), norms) == pytest.approx(expected)


def test_fixed_threshold_and_factor() -> None:
    assert clip_threshold(ClipConfig(norm=0.7), [0.1] * 50) == 0.7
    assert clip_factor(1.4, 0.7) == pytest.approx(0.5)
    assert clip_factor(1.4, 0.0) == 1.0
