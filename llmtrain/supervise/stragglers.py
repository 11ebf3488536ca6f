"""Slow ranks, from the ranks' own compute times. Pure.

All ranks of a step finish it together, so only the time that each computed, without its waits, tells who is
slow. Compared are ranks that do the same work: one pipeline stage, the same number of micro-batches in the
steps of a window, also while the batch grows. Of each window (the mean over a few steps) a rank's time is
divided by the median of its peers'; a rank is slow when the median of that ratio over the last windows is
above 1 by more than a floor, and by more than five times its standard error, which follows from how much the
ratios of all peers change from window to window (a quantile: one slow rank does not change it). So machines
whose ranks disturb each other raise no alarm, and a quiet cluster names a rank that is 5 % slow.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig

WINDOWS = 8
"""Newest windows of each rank that are judged: 40 steps."""
FLOOR = 0.03
"""Least excess over the peers that is named."""
SUSTAINED, SUSTAINED_WINDOWS = 0.01, 7
"""So many of the windows must be in excess of so much: one slow moment is no slow rank."""
ERRORS = 5.0
"""Standard errors of the median that the excess must have."""
RECOVERED = 0.015
"""A rank that was named is so again only after its excess was below."""
QUANTILE, DEVIATIONS_AT_QUANTILE = 0.8, 1.2816
"""Quantile of the changes' sizes that the deviation follows from, and the same of the normal distribution:
high enough to see long tails, low enough not to see one rank that limps."""
NOISY, NOISY_DEVIATIONS = 0.08, 4.0
"""From such a deviation on, only an excess of so many deviations counts."""
NOISIEST = 0.15
"""Beyond such a deviation nobody is named: times tell more of the machine than of a rank."""
MEMORY, MOST_SAMPLED = 64, 16
"""Changes that are remembered: of so many windows; and looked at: of so many ranks."""
ERROR_OF_MEDIAN = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2)."""
OPEN_WINDOWS = 4
"""Windows that may still be incomplete: ranks tell at their own pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A slow rank."""

    rank: int
    excess: float
    """Over its peers; 0.05: it takes 5 % longer."""
    step: int
    peers: int
    """Ranks that it was compared with."""


Role = Hashable
"""Ranks of one role are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What ranks do in some steps."""

    role_of: Mapping[int, Role]
    """Rank -> role."""
    members: Mapping[Role, Sequence[int]]
    """Ranks of each role."""


@dataclass(slots=True)
class Stragglers:
    """Compute times of one attempt's ranks. `work_in` tells, for the first and the last step of a window,
    which ranks do the same in it."""

    work_in: Callable[[int, int], Work]
    _open: dict[int, dict[int, float]] = field(default_factory=dict)
    _ratios: dict[int, deque[float]] = field(default_factory=dict)
    _changes: dict[int, deque[float]] = field(default_factory=dict)
    """How much each rank's ratio changed from window to window."""
    _named: set[int] = field(default_factory=set)

    def observe(self, rank: int, step: int, seconds: float, steps: int = 1) -> list[Straggler]:
        """Take in a rank's mean compute time of the window of some steps that ends with a step; return ranks
        that are now known to be slow and were not before."""
        if not (math.isfinite(seconds) and seconds > 0.0):
            return []
        window = self._open.setdefault(step, {})
        window[rank] = seconds
        while len(self._open) > OPEN_WINDOWS:
            del self._open[min(self._open)]
        work = self.work_in(step - steps + 1, step)
        role = work.role_of.get(rank)
        ranks = work.members.get(role, ())
        if len(ranks) < 2 or not all(each in window for each in ranks):
            return []
        self._take_window({each: window[each] for each in ranks})
        return [found for each in ranks if (found := self._look(each, ranks, step)) is not None]

    def _take_window(self, times: Mapping[int, float]) -> None:
        ordered = sorted(times.values())
        for rank, seconds in times.items():
            peers = list(ordered)
            peers.remove(seconds)
            ratio = seconds / statistics.median(peers)
            ratios = self._ratios.setdefault(rank, deque(maxlen=WINDOWS))
            if ratios:
                self._changes.setdefault(rank, deque(maxlen=MEMORY)).append(abs(ratio - ratios[-1]))
            ratios.append(ratio)

    def _look(self, rank: int, ranks: Sequence[int], step: int) -> Straggler | None:
        ratios = self._ratios[rank]
        excess = statistics.median(ratios) - 1.0
        if excess < RECOVERED:
            self._named.discard(rank)
        if len(ratios) < WINDOWS or rank in self._named or excess < FLOOR:
            return None
        if sum(ratio > 1.0 + SUSTAINED for ratio in ratios) < SUSTAINED_WINDOWS:
            return None
        deviation = self._deviation(ranks)
        least = ERRORS * ERROR_OF_MEDIAN * deviation / math.sqrt(len(ratios))
        if deviation > NOISIEST:
            return None
        if deviation > NOISY:
            least = max(least, NOISY_DEVIATIONS * deviation)
        if excess < least:
            return None
        self._named.add(rank)
        return Straggler(rank=rank, excess=excess, step=step, peers=len(ranks) - 1)

    def _deviation(self, ranks: Sequence[int]) -> float:
        """Standard deviation of the ratios of some ranks, from how much they change."""
        sampled = ranks[:: -(-len(ranks) // MOST_SAMPLED)]
        changes = sorted(change for rank in sampled for change in self._changes[rank])
        # The difference of two values scatters by sqrt(2) more than each.
        return changes[int(QUANTILE * (len(changes) - 1))] / DEVIATIONS_AT_QUANTILE / math.sqrt(2.0)


def stragglers_of(layout: Layout, batch: BatchConfig) -> Stragglers:
    """Nothing observed yet, of ranks in a layout. Those of one pipeline stage with equally many micro-batches
    do the same work."""

    @lru_cache(maxsize=4)
    def work(counts: tuple[int, ...]) -> Work:
        places = [layout.dims.coordinate(rank) for rank in range(layout.world_size)]
        return work_of({rank: (place.pp, counts[place.dp]) for rank, place in enumerate(places)})

    def work_in(first: int, last: int) -> Work:
        sizes = [layout.micro_batches(batch.at(step)) for step in range(first, last + 1)]
        return work(tuple(sum(replica) for replica in zip(*sizes, strict=True)))

    return Stragglers(work_in)


def work_of(role_of: Mapping[int, Role]) -> Work:
    """Work by the roles of all ranks."""
    found: dict[Role, list[int]] = {}
    for rank, role in role_of.items():
        found.setdefault(role, []).append(rank)
    return Work(role_of=role_of, members={role: tuple(ranks) for role, ranks in found.items()})
