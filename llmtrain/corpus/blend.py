"""Which corpus of a blend a global sample comes from, and its place there: a pure function of the weights.

The samples of every prefix are as near to the weights as whole samples can be: a corpus with share w has, of
the first n samples, more than n w - 1 and fewer than n w + 1. This is proportionate scheduling of one
resource: the j-th sample of a corpus may come from place floor((j - 1) / w) on and must have come before
place ceil(j / w); the earliest deadline among those that may come always meets all deadlines (Baruah, Cohen,
Plaxton, Varvel, "Proportionate progress", 1996; Anderson and Srinivasan, "Mixed Pfair/ERfair scheduling",
2004). With shares q / P the schedule repeats after P places, so that one table serves all samples.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

LONGEST_PERIOD = 1 << 16
"""Shares whose common denominator is larger are rounded to multiples of 1 / 65536."""


class Blend:
    """The interleaving of some corpora; raises ValueError without weights or for one that is not positive."""

    __slots__ = ("_corpus", "_rank", "period", "quotas")

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas = quotas(weights)
        self.period = sum(self.quotas)
        self._corpus, self._rank = _schedule(self.quotas)

    def place(self, sample: int) -> tuple[int, int]:
        """Corpus of global sample 0, 1, 2, ..., and how many samples of that corpus come before it."""
        if sample < 0:
            raise ValueError(f"sample must not be negative, not {sample}")
        round_, slot = divmod(sample, self.period)
        corpus = self._corpus[slot]
        return corpus, round_ * self.quotas[corpus] + self._rank[slot]

    def counts(self, samples: int) -> list[int]:
        """Samples of every corpus among the first `samples`; linear in the period, not in the samples."""
        rounds, rest = divmod(samples, self.period)
        found = [rounds * quota for quota in self.quotas]
        for corpus in self._corpus[:rest]:
            found[corpus] += 1
        return found


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of the weights, each at least 1; their sum is the period.

    A weight counts as the decimal number that was written: 0.1 is a tenth. Largest remainders round up where
    the common denominator is beyond LONGEST_PERIOD.
    """
    if not weights or any(not weight > 0 for weight in weights):
        raise ValueError(f"a blend needs positive weights, not {list(weights)}")
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    wanted = [share * LONGEST_PERIOD for share in shares]
    found = [max(1, int(want)) for want in wanted]
    order = sorted(range(len(found)), key=lambda at: (found[at] - wanted[at], at))
    for at in order[: max(0, LONGEST_PERIOD - sum(found))]:
        found[at] += 1
    return tuple(found)


def _schedule(quotas: Sequence[int]) -> tuple[array[int], array[int]]:
    """Corpus of every slot of a period, and the number of its earlier slots."""
    period = sum(quotas)
    corpora, ranks = array("B", bytes(period)), array("I", bytes(4 * period))
    ready: list[tuple[int, int, int]] = []
    """(deadline, corpus, rank) of samples that may come."""
    waiting = [(0, corpus, 0) for corpus in range(len(quotas))]
    """(release, corpus, rank) of those that may not yet."""
    heapq.heapify(waiting)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, corpus, rank = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(rank + 1) * period // quotas[corpus]), corpus, rank))
        _, corpus, rank = heapq.heappop(ready)
        corpora[slot], ranks[slot] = corpus, rank
        if rank + 1 < quotas[corpus]:
            heapq.heappush(waiting, ((rank + 1) * period // quotas[corpus], corpus, rank + 1))
    return corpora, ranks
