"""What the gradients of each layer look like: taken from the reduced shards, a few passes over them every few
steps, and one exchange of some numbers a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.engine.numerics.layer_names import EMBEDDING, HEAD, layer_of
from llmtrain.engine.parallel.buckets import Bucket, Buckets
from llmtrain.engine.parallel.groups import Group

FP16_MAX, FP16_TINY = 65504.0, 2.0**-24
"""Largest finite number of FP16, and its smallest subnormal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradient:
    """One layer's gradient of the whole step, over all ranks. Shares are of its values."""

    layer: str
    norm: float
    """Unscaled, of the finite values."""
    largest: float
    """Largest finite magnitude, unscaled."""
    above: float
    """Share above FP16's largest number, as it was computed: with the loss scale."""
    below: float
    """Share that is not zero, but below FP16's smallest subnormal."""
    nonfinite: float
    zero: float

    def abnormal(self, mode: str) -> float:
        """Share that the mode cannot hold. What FP16 rounded to zero cannot be told from a true zero, which
        no weight of a block has in practice; rows of an embedding have many."""
        if mode != "fp16":
            return self.nonfinite + self.above
        lost = self.zero if self.layer not in (EMBEDDING, HEAD) else 0.0
        return self.nonfinite + self.above + self.below + lost


def measure(buckets: Buckets, world: Group, layers: Sequence[str], scale: float) -> tuple[LayerGradient, ...]:
    """Look at all layers; every rank of the world must call it, and gets the same. The reduced gradients hold
    `scale` times the true ones."""
    device = buckets.buckets[0].reduced.device
    sums = torch.zeros(len(layers), 6, dtype=torch.float64, device=device)
    tops = torch.zeros(len(layers), dtype=torch.float64, device=device)
    place = {layer: index for index, layer in enumerate(layers)}
    for bucket in buckets.buckets:
        for layer, part in counted_parts(bucket):
            finite, top = _look(part, sums[place[layer]])
            sums[place[layer], 0] += finite
            tops[place[layer]] = torch.maximum(tops[place[layer]], top)
    world.all_reduce(sums)
    tops = world.all_gather(tops.unsqueeze(0)).amax(0)
    rows = zip(layers, sums.tolist(), tops.tolist(), strict=True)
    return tuple(_layer_gradient(layer, numbers, top, scale) for layer, numbers, top in rows if numbers[5])


def counted_parts(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Layer and values of every stretch of the reduced shard that this rank counts: of equal copies one."""
    for slot in bucket.slots:
        for run in bucket.runs:
            low = max(slot.start - bucket.first, run.start)
            high = min(slot.stop - bucket.first, run.stop)
            if run.counted and low < high:
                yield layer_of(slot.parameter.spec.pieces[0].name), bucket.reduced[low:high]


def _look(part: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Add a stretch's counts to [square sum, above, below, not finite, zero, all]; return the sum of squares
    of the finite values and the largest one."""
    size = part.abs()
    finite = size.isfinite()
    kept = torch.where(finite, size, 0.0)
    zero = size == 0
    counts = torch.stack(
        (
            (finite & (size > FP16_MAX)).sum(),
            ((size < FP16_TINY) & ~zero).sum(),
            (~finite).sum(),
            zero.sum(),
        )
    )
    sums[1:5] += counts
    sums[5] += part.numel()
    return torch.linalg.vector_norm(kept).double().square(), kept.amax().double()


def _layer_gradient(layer: str, numbers: Sequence[float], top: float, scale: float) -> LayerGradient:
    squares, above, below, nonfinite, zero, count = numbers
    return LayerGradient(
        layer=layer,
        norm=float(squares**0.5 / scale),
        largest=top / scale,
        above=above / count,
        below=below / count,
        nonfinite=nonfinite / count,
        zero=zero / count,
    )
