"""Flat buckets: BF16 parameters, FP32 gradient sums, and this replica's FP32 shard of the optimizer state
(ZeRO-1).

A bucket is a few parameters laid end to end. Gradients of all micro-batches are summed in FP32 into its
flat buffer; when the last one has arrived, the bucket's reduce-scatter over the replicas starts while the
backward pass goes on. The shard is a contiguous 1/dp of the bucket, cut anywhere, also inside a parameter;
with zero=0 it is the whole bucket on every replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmtrain.engine.model.parameters import ModelParameter
from llmtrain.engine.parallel.groups import Group, Pending


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket, in elements."""

    parameter: ModelParameter
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a shard that is treated alike, in elements of the shard."""

    start: int
    stop: int
    decay: bool
    counted: bool
    """Whether this rank adds it to the global gradient norm; of equal copies only one is."""


@dataclass(slots=True)
class Bucket:
    """Some parameters, flat."""

    slots: tuple[Slot, ...]
    replicas: Group
    """Ranks that the gradients are summed over."""
    sharded: bool
    """Whether each replica keeps a part of the optimizer state, or all of it."""
    beyond: Group | None
    """Group that the reduced shard is also summed over: tensor-parallel ranks that saw a part of the
    sequence or of the heads, or the two ends of the pipeline that share an embedding."""
    parameters: Tensor
    """[padded] in the compute format; the model's parameters are views of it."""
    gradients: Tensor
    """[padded] FP32."""
    master: Tensor
    """[shard] FP32."""
    exp_avg: Tensor
    """[shard] FP32, first moment."""
    exp_avg_sq: Tensor
    """[shard] FP32, second moment."""
    reduced: Tensor
    """[shard] FP32, the gradient summed over the replicas; a view of `gradients` where nothing is
    scattered."""
    first: int
    """First element of the shard in the bucket."""
    runs: tuple[Run, ...]
    waiting: int = 0
    """Gradients still to come in this step."""
    pending: Pending | None = field(default=None)

    @property
    def shard_stop(self) -> int:
        """One past the last element of the shard in the bucket."""
        return self.first + self.master.numel()

    def start_reduction(self) -> None:
        """Begin to sum the gradients over the replicas."""
        if self.sharded:
            self.pending = self.replicas.start_reduce_scatter(self.reduced, self.gradients)
        else:
            self.pending = self.replicas.start_all_reduce(self.gradients)

    def start_publishing(self) -> Pending:
        """Round the master shard to the compute format and begin to gather all shards into the parameters."""
        own = self.parameters[self.first : self.shard_stop]
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master)
        return self.replicas.start_all_gather(self.parameters, own) if self.sharded else Pending()


class Buckets:
    """All buckets of a rank, in the order in which the backward pass fills them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self._places = {
            id(slot.parameter): (bucket, bucket.gradients[slot.start : slot.stop].view(slot.parameter.shape))
            for bucket in self.buckets
            for slot in bucket.slots
        }
        self._fresh: set[int] = set()
        self._next = 0
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(self.accumulate)

    def begin_step(self, micro_batches: int) -> None:
        """Expect one gradient of every parameter from each micro-batch."""
        self._fresh = set(self._places)
        self._next = 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots) * micro_batches

    def accumulate(self, parameter: Tensor) -> None:
        """Add a parameter's new gradient to its FP32 sum and drop it; start every reduction that has become
        possible."""
        key = id(parameter)
        bucket, total = self._places[key]
        gradient = parameter.grad
        if gradient is None:  # A zero-bubble schedule put it off; it comes later.
            return
        if key in self._fresh:
            self._fresh.discard(key)
            total.copy_(gradient)
        else:
            total.add_(gradient)
        parameter.grad = None
        bucket.waiting -= 1
        if not bucket.waiting:
            self._start_ready()

    def _start_ready(self) -> None:
        # In one order everywhere: replicas must start the same collectives in the same order.
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self.buckets[self._next].start_reduction()
            self._next += 1

    def finish_reduction(self) -> None:
        """Wait until every shard's `reduced` holds the gradient of the whole step."""
        if self._next < len(self.buckets):
            late = [slot.parameter.spec.pieces[0].name for slot in self.buckets[self._next].slots]
            raise RuntimeError(f"no gradient came for some of {', '.join(late)}")
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
            if bucket.beyond is not None:
                bucket.beyond.all_reduce(bucket.reduced)

    def squared_norm(self) -> Tensor:
        """Sum of squares, FP64 scalar, of the reduced gradients that this rank counts."""
        parts = [
            bucket.reduced[run.start : run.stop]
            for bucket in self.buckets
            for run in bucket.runs
            if run.counted
        ]
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=self.buckets[0].reduced.device)
        norms = torch.stack(torch._foreach_norm(parts))
        return norms.double().square_().sum()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients."""
        torch._foreach_mul_([bucket.reduced for bucket in self.buckets], factor)

    def publish(self) -> None:
        """Bring the master weights of all shards into every replica's parameters."""
        for pending in [bucket.start_publishing() for bucket in self.buckets]:
            pending.wait()

    def initialise(self, seed: int) -> None:
        """Fill the master weights from the seed, in full FP32, and publish them."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.stop > bucket.first and slot.start < bucket.shard_stop:
                    _fill_master(bucket, slot, seed)
            bucket.exp_avg.zero_()
            bucket.exp_avg_sq.zero_()
        self.publish()

    def pieces(self) -> Iterator[tuple[Bucket, ModelParameter, int, int, int, int]]:
        """Every stretch of a logical tensor that lies in a shard of this rank: bucket, parameter, number of
        the piece, first element in the piece's box, first and last element in the shard."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                start = slot.start
                for number, piece in enumerate(slot.parameter.spec.pieces):
                    low, high = max(start, bucket.first), min(start + piece.numel, bucket.shard_stop)
                    if low < high:
                        yield (
                            bucket,
                            slot.parameter,
                            number,
                            low - start,
                            low - bucket.first,
                            high - bucket.first,
                        )
                    start += piece.numel


def _fill_master(bucket: Bucket, slot: Slot, seed: int) -> None:
    values = torch.cat([piece.initial(seed).flatten() for piece in slot.parameter.spec.pieces])
    low, high = max(slot.start, bucket.first), min(slot.stop, bucket.shard_stop)
    bucket.master[low - bucket.first : high - bucket.first].copy_(
        values[low - slot.start : high - slot.start]
    )
