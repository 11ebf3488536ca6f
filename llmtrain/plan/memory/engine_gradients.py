"""Whole gradients on their way, where this engine keeps shards of them alone (ZeRO-2 and 3)."""

from __future__ import annotations

from collections import deque

from llmtrain.plan.memory.bucket_packing import BUCKETS_AT_ONCE
from llmtrain.plan.memory.engine_block import Ledger

_THERE = (1 << 30, 0.0)
"""A bucket whose memory was taken before."""
Mark = tuple[int, float, tuple[float, ...]]
"""The next bucket, the bytes alive, and what was begun before: all that the rest depends on."""


class Gradients:
    """Whole FP32 gradients of buckets of which only shards are kept (ZeRO-2 and 3): one is filled while
    others travel."""

    def __init__(self, ledger: Ledger, buckets: list[tuple[int, float]], replicas: int) -> None:
        """`buckets`: gradients and bytes of each, in the order of the backward pass."""
        self._ledger, self._buckets, self._replicas = ledger, buckets, replicas
        self._place = 0
        self._missing, self._size = 0, 0.0
        self._under_way: deque[float] = deque()

    def arrive(self, weight: float) -> None:
        """The next gradient, of `weight` bytes in the compute format, has come."""
        if not self._missing:
            rest = len(self._buckets) - self._place
            self._missing, self._size = self._buckets[self._place] if rest else _THERE
            self._place += rest > 0
            self._ledger.take(self._size)
            if rest > 1 and self._missing == 1 and self._size < weight:
                # A bias: its weight's gradient has come before it, but is reduced after it.
                self._ledger.touch(self._buckets[self._place][1] + weight)
        self._ledger.touch(weight)
        self._missing -= 1
        if self._missing:
            return
        while len(self._under_way) >= BUCKETS_AT_ONCE - 1:
            self._ledger.free(self._under_way.popleft())
        shard = self._size / self._replicas
        self._ledger.take(shard)
        self._under_way.append(self._size + shard)

    def mark(self) -> Mark:
        """Where a block begins."""
        return self._place, self._ledger.now, (self._missing, self._size, *self._under_way)

    def pass_over(self, before: Mark, most: int) -> int:
        """Pass over blocks that must go like the one that began at `before` and has ended now, with no more
        beside them: the same gradients in the same buckets. Returns how many, at most `most`."""
        first, now, state = before
        count, change = self._place - first, self._ledger.now - now
        if not count or change > 0 or state != self.mark()[2]:
            return 0
        ahead, alike = self._buckets, 0
        while self._place + alike < len(ahead) and ahead[self._place + alike] == ahead[first + alike % count]:
            alike += 1
        # One more bucket must be alike: a bucket's first gradient may look at the next one.
        passed = max(0, min(most, (alike - 1) // count))
        self._place += passed * count
        self._ledger.now += passed * change
        return passed


def pack_sites(sites: list[list[float]], bucket: int, *, by_site: bool) -> list[tuple[int, float]]:
    """Gradients and FP32 bytes of each bucket, from the elements of each site's parameters; what
    `Packing.pack` does to plain ones."""
    found: list[tuple[int, float]] = []
    for number, site in enumerate(sites):
        for place, elements in enumerate(site):
            is_cut = by_site and not place
            if not number + place or is_cut or found[-1][1] + 4 * elements > bucket:
                found.append((0, 0.0))
            found[-1] = found[-1][0] + 1, found[-1][1] + 4 * elements
    return found
