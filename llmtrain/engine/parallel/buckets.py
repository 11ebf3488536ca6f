"""Flat buckets: BF16 parameters, FP32 gradient sums, and this replica's FP32 shard of the optimizer state.

A bucket is a few parameters laid end to end. The shard is a contiguous 1/dp of it, cut anywhere, also
inside a parameter. What else is cut is the ZeRO stage (Rajbhandari et al. 2020):

- 0: nothing; every replica keeps all of it and gradients are all-reduced.
- 1: the optimizer state. Gradients of all micro-batches are summed in FP32 into the flat buffer; when the
  last one has arrived, the bucket's reduce-scatter over the replicas starts while the backward pass goes on.
- 2: gradients too. The flat buffer lives from a bucket's first gradient of a micro-batch to its
  reduce-scatter; the shards of all micro-batches are summed.
- 3: parameters too (`gathering.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmtrain.engine.model.parameters import ModelParameter
from llmtrain.engine.parallel.groups import DONE, Group, Pending
from llmtrain.engine.parallel.reduction_order import ReductionOrder
from llmtrain.engine.parallel.replicas import Chain, Replicas
from llmtrain.plan.memory.bucket_packing import BUCKETS_AT_ONCE

MOST_UNDER_WAY = BUCKETS_AT_ONCE - 1
"""Reductions whose whole gradients may wait for the replicas at once, where they are released afterwards."""


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


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Some parameters, flat."""

    slots: tuple[Slot, ...]
    replicas: Replicas
    """Ranks that the gradients are summed over."""
    sharded: bool
    """Whether each replica keeps a part of the optimizer state, or all of it."""
    chunk: int
    """Pipeline chunk of this rank that the parameters belong to."""
    releases: bool
    """Whether gradients are reduced in every micro-batch, and only the shard is kept."""
    gathers: bool
    """Whether parameters are there only while they are used."""
    beyond: Group | None
    """Group that the reduced shard is also summed over: tensor-parallel ranks that saw a part of the
    sequence or of the heads, or the two ends of the pipeline that share an embedding."""
    parameters: Tensor
    """[padded] in the compute format; the model's parameters are views of it. Without storage between uses
    where the bucket `gathers`."""
    gradients: Tensor | None
    """[padded] FP32; None between micro-batches where the bucket `releases`."""
    own: Tensor
    """[shard] in the compute format: this replica's part of `parameters`, or where they are gathered from."""
    master: Tensor
    """[shard] FP32."""
    exp_avg: Tensor
    """[shard] FP32, first moment."""
    exp_avg_sq: Tensor
    """[shard] FP32, second moment."""
    reduced: Tensor
    """[shard] FP32, the gradient summed over the replicas; a view of `gradients` where nothing is
    scattered."""
    errors: list[Tensor]
    """What compression rounded away, to be sent with the next gradient; one buffer a level."""
    first: int
    """First element of the shard in the bucket."""
    runs: tuple[Run, ...]
    arrived: int = 0
    """Gradients that have come in this step."""
    expected: int = 0
    """Gradients of the whole step."""
    reductions: int = 0
    """Reductions that have come back in this step."""
    publishing: Pending = DONE
    """Gathering of new parameters that may still be under way."""
    written: set[int] = field(default_factory=set)
    """Slots whose place in `gradients` holds numbers of this step, or of this micro-batch."""

    @property
    def padded(self) -> int:
        """Elements of the bucket, with padding."""
        return self.parameters.numel()

    @property
    def shard_stop(self) -> int:
        """One past the last element of the shard in the bucket."""
        return self.first + self.master.numel()

    def add(self, number: int, gradient: Tensor) -> None:
        """Add a slot's gradient to its FP32 sum."""
        if self.gradients is None:
            self.gradients = torch.empty(self.padded, dtype=torch.float32, device=self.master.device)
            self.gradients[self.slots[-1].stop :].zero_()
        slot = self.slots[number]
        total = self.gradients[slot.start : slot.stop].view(gradient.shape)
        if number in self.written:
            total.add_(gradient)
        else:
            self.written.add(number)
            total.copy_(gradient)
        self.arrived += 1

    def start_reduction(self) -> Pending:
        """Begin to sum the gradients that have come over the replicas."""
        if not self.sharded:
            return self.replicas.start_all_reduce(self._whole())
        if not self.releases:
            return self.replicas.start_reduce_scatter(self.reduced, self._whole(), self.errors)
        full, self.gradients = self._whole(), None
        for number, slot in enumerate(self.slots):
            if number not in self.written:
                full[slot.start : slot.stop].zero_()
        self.written.clear()
        part = torch.empty_like(self.reduced)
        return self.replicas.start_reduce_scatter(part, full, self.errors, then=lambda: self._take(part))

    def _whole(self) -> Tensor:
        """The gradient sums; zeros where this replica has no micro-batch for the others' reduction."""
        if self.gradients is not None:
            return self.gradients
        return torch.zeros(self.padded, dtype=torch.float32, device=self.master.device)

    def _take(self, part: Tensor) -> None:
        if self.reductions:
            self.reduced.add_(part)
        else:
            self.reduced.copy_(part)
        self.reductions += 1

    def start_gathering(self) -> Pending:
        """Begin to gather all shards into the parameters."""
        return self.replicas.start_all_gather(self.parameters, self.own) if self.sharded else DONE

    def start_publishing(self) -> Pending:
        """Round the master shard to the compute format, and begin to bring it to all replicas unless they
        gather it when they need it."""
        if self.own.data_ptr() != self.master.data_ptr():
            self.own.copy_(self.master)
        return DONE if self.gathers else self.start_gathering()


class Buckets:
    """All buckets of a rank, in the order in which the backward pass fills them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self._places = {
            id(slot.parameter): (bucket, number)
            for bucket in self.buckets
            for number, slot in enumerate(bucket.slots)
        }
        self._order = ReductionOrder(self.buckets, 1, 1)
        self._under_way: deque[Pending] = deque()
        self._releasing = any(bucket.releases for bucket in self.buckets)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(self.accumulate)

    def begin_step(self, micro_batches: int, busiest: int = 0) -> None:
        """Expect one gradient of every parameter from each micro-batch; `busiest` is the largest number of
        micro-batches of any replica."""
        self._order = ReductionOrder(self.buckets, micro_batches, max(busiest, micro_batches))
        for bucket in self.buckets:
            bucket.arrived = bucket.reductions = 0
            bucket.expected = len(bucket.slots) * micro_batches
            bucket.written.clear()

    def accumulate(self, parameter: Tensor) -> None:
        """Add a parameter's new gradient to its FP32 sum and drop it; start every reduction that has become
        possible."""
        gradient = parameter.grad
        if gradient is None:  # A zero-bubble schedule put it off; it comes later.
            return
        bucket, number = self._places[id(parameter)]
        bucket.add(number, gradient)
        parameter.grad = None
        if bucket.arrived % len(bucket.slots) == 0:
            self._start(self._order.possible(bucket))

    def _start(self, buckets: Iterator[Bucket]) -> None:
        for bucket in buckets:
            if self._releasing:
                while len(self._under_way) >= MOST_UNDER_WAY:
                    self._under_way.popleft().wait()
            for pending in self._under_way:
                if isinstance(pending, Chain):
                    pending.advance()
            self._under_way.append(bucket.start_reduction())

    def finish_reduction(self) -> None:
        """Wait until every shard's `reduced` holds the gradient of the whole step."""
        for bucket in self.buckets:
            if bucket.arrived != bucket.expected:
                late = [slot.parameter.spec.pieces[0].name for slot in bucket.slots]
                raise RuntimeError(f"no gradient came for some of {', '.join(late)}")
        self._start(self._order.rest())
        while self._under_way:
            self._under_way.popleft().wait()
        for bucket in self.buckets:
            if bucket.beyond is not None:
                bucket.beyond.all_reduce(bucket.reduced)

    def forget_errors(self) -> None:
        """Drop what compression rounded away so far. Done at every checkpoint, so that a run that goes on and
        one that restarts from it, on any layout, compute the same."""
        for bucket in self.buckets:
            for errors in bucket.errors:
                errors.zero_()

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

    def start_publishing(self) -> None:
        """Begin to bring the master weights of all shards into every replica's parameters, those that the
        forward pass needs first; each is waited for at its first use."""
        self.settle()
        for bucket in reversed(self.buckets):
            bucket.publishing = bucket.start_publishing()

    def settle(self) -> None:
        """Wait until no parameters are on their way. For whoever reads them outside of a stage's passes."""
        for bucket in self.buckets:
            bucket.publishing.wait()

    def publish(self) -> None:
        """Bring the master weights of all shards into every replica's parameters."""
        self.start_publishing()
        self.settle()

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
                        place = low - start, low - bucket.first, high - bucket.first
                        yield bucket, slot.parameter, number, *place
                    start += piece.numel


def _fill_master(bucket: Bucket, slot: Slot, seed: int) -> None:
    values = torch.cat([piece.initial(seed).flatten() for piece in slot.parameter.spec.pieces])
    low, high = max(slot.start, bucket.first), min(slot.stop, bucket.shard_stop)
    bucket.master[low - bucket.first : high - bucket.first].copy_(
        values[low - slot.start : high - slot.start]
    )
