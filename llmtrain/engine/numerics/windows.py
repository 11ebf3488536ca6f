"""Recent values of the loss and of the gradient norm: robust spikes, and the threshold of adaptive clipping.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.config.numerics import ClipConfig, SpikeConfig
from llmtrain.events.words import SpikeQuantity

MAD_TO_DEVIATION = 1.4826
"""1 / the 75th percentile of a standard normal: what makes the MAD a standard deviation."""
FEWEST = 32
"""Values that a comparison needs; a smaller window needs to be full."""
LEAST_EXCESS: dict[SpikeQuantity, float] = {"loss": 0.05, "grad_norm": 1.0}
"""Smallest excess over the median, as a share of it, that is a spike: noise in a window of nearly equal
values must not be one."""
FEWEST_NORMS = 10
"""Norms that an adaptive threshold needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A value far above the recent ones."""

    quantity: SpikeQuantity
    value: float
    median: float
    deviation: float
    """1.4826 x MAD."""


def find_spike(
    quantity: SpikeQuantity, value: float, recent: Sequence[float], config: SpikeConfig
) -> Spike | None:
    """The spike that a finite value is, against the window of accepted values before it."""
    if config.action == "off" or len(recent) < min(FEWEST, config.window):
        return None
    median = statistics.median(recent)
    deviation = MAD_TO_DEVIATION * statistics.median(abs(one - median) for one in recent)
    limit = median + max(config.threshold * deviation, LEAST_EXCESS[quantity] * abs(median))
    return (
        Spike(quantity=quantity, value=value, median=median, deviation=deviation) if value > limit else None
    )


def pushed(window: tuple[float, ...], value: float, size: int) -> tuple[float, ...]:
    """The window after one more value."""
    return (*window, value)[-size:]


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile, linear between the two nearest ranks (as numpy's); raises ValueError without values."""
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def clip_threshold(config: ClipConfig, norms: Sequence[float]) -> float:
    """Largest global gradient norm of the next step; 0: no clipping."""
    if config.percentile is None or len(norms) < min(FEWEST_NORMS, config.window):
        return config.norm
    return min(config.norm, max(config.lowest, percentile(norms, config.percentile)))


def clip_factor(norm: float, limit: float) -> float:
    """Factor that brings gradients of a global norm down to the limit; 1 when they are within it, or the
    limit is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
