"""A batch that grows: how many samples each step takes, and which ones. Pure arithmetic, the one place that
engine, audit and views ask.

The ramp takes the global batch from `start` to its final size in equal increments, each for an equal share of
the ramp's steps. Steps and samples count as everywhere: steps from 1, samples from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.fields import PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRamp:
    """Growth of the global batch at the start of a training."""

    start: PositiveInt
    """Sequences of the first step."""
    steps: PositiveInt
    """Steps after which the batch has its final size."""
    increment: PositiveInt | None = None
    """Sequences that the batch grows by at a time; default: `start`."""

    def sizes(self, final: int) -> tuple[int, ...]:
        """Batches before the final one, ascending."""
        return tuple(range(self.start, final, self.increment or self.start))


def batch_at(ramp: BatchRamp | None, final: int, step: int) -> int:
    """Sequences of a step, counted from 1."""
    if ramp is None or step > ramp.steps:
        return final
    sizes = ramp.sizes(final)
    return sizes[(step - 1) * len(sizes) // ramp.steps] if sizes else final


def samples_before(ramp: BatchRamp | None, final: int, step: int) -> int:
    """Samples that all steps before this one took: the index of its first sample."""
    done = step - 1
    if ramp is None:
        return done * final
    sizes = ramp.sizes(final)
    starts = [-(-stage * ramp.steps // len(sizes)) for stage in range(len(sizes))]
    total = max(0, done - ramp.steps) * final
    for size, first, stop in zip(sizes, starts, [*starts[1:], ramp.steps], strict=True):
        total += size * max(0, min(done, stop) - first)
    return total if sizes else done * final


def steps_for(ramp: BatchRamp | None, final: int, samples: int) -> int:
    """Fewest steps that take at least so many samples."""
    if ramp is None:
        return -(-samples // final)
    in_ramp = samples_before(ramp, final, ramp.steps + 1)
    if samples >= in_ramp:
        return ramp.steps - (in_ramp - samples) // final
    low, high = 0, ramp.steps
    while low < high:
        middle = (low + high) // 2
        if samples_before(ramp, final, middle + 1) >= samples:
            high = middle
        else:
            low = middle + 1
    return low
