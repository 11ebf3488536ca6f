"""In which order buckets are reduced: replicas must start the same collectives in the same order, however
many micro-batches each of them has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.engine.parallel.buckets import Bucket


class _Lane:
    """Buckets that are reduced in turn, round after round; a round is a micro-batch."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.started = 0

    def possible(self) -> Iterator[Bucket]:
        """Yield, in turn, the buckets whose gradients of the next round have come. A gradient of a later
        round that came early goes with it: only the sum over all rounds counts."""
        while True:
            finished, place = divmod(self.started, len(self.buckets))
            bucket = self.buckets[place]
            if bucket.arrived < min((finished + 1) * len(bucket.slots), bucket.expected + 1):
                return
            self.started += 1
            yield bucket

    def rest(self, rounds: int) -> Iterator[Bucket]:
        """Yield what is left of all rounds: those that only busier replicas have a micro-batch for."""
        for number in range(self.started, rounds * len(self.buckets)):
            yield self.buckets[number % len(self.buckets)]
        self.started = rounds * len(self.buckets)


class ReductionOrder:
    """One step's order.

    Buckets that are reduced once go in bucket order. Those reduced in every micro-batch go by rounds; where
    all replicas have as many micro-batches, they follow the same schedule, and the chunks of an interleaved
    pipeline, whose rounds come at different times, are independent. Buckets of the two sorts never wait for
    each other.
    """

    def __init__(self, buckets: Sequence[Bucket], micro_batches: int, busiest: int) -> None:
        self._rounds = busiest
        once = [bucket for bucket in buckets if not bucket.releases]
        every = [bucket for bucket in buckets if bucket.releases]
        chunks = sorted({bucket.chunk for bucket in every}) if micro_batches == busiest else [-1]
        self._lanes = [
            _Lane([bucket for bucket in every if chunk in (-1, bucket.chunk)]) for chunk in chunks if every
        ]
        self._once = _Lane(once) if once else None
        self._lane_of = {id(bucket): lane for lane in self._lanes for bucket in lane.buckets}

    def possible(self, filled: Bucket) -> Iterator[Bucket]:
        """Yield the reductions that can start now that a bucket has been filled."""
        lane = self._lane_of.get(id(filled))
        if lane is not None:
            yield from lane.possible()
        elif self._once is not None and not self._lanes and filled.arrived == filled.expected:
            yield from self._all_arrived(self._once)

    @staticmethod
    def _all_arrived(lane: _Lane) -> Iterator[Bucket]:
        while lane.started < len(lane.buckets):
            bucket = lane.buckets[lane.started]
            if bucket.arrived < bucket.expected:
                return
            lane.started += 1
            yield bucket

    def rest(self) -> Iterator[Bucket]:
        """Yield every reduction that the step still owes, when all gradients have come."""
        for lane in self._lanes:
            yield from lane.rest(self._rounds)
        if self._once is not None:
            yield from self._once.rest(1)
