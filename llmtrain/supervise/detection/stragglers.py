"""Slow ranks, from the ranks' own compute times. Pure.

All ranks of a step finish it together, so only the time that each computed, without its waits, tells who is
slow. Compared are ranks that do the same work: one pipeline stage, the same number of micro-batches in the
steps of a window, also while the batch grows. Of each window (the mean over a few steps) a rank's time is
divided by the median of its peers'; a rank is slow when the median of that ratio over the last windows is
above 1 by more than a floor, and by more than five times its standard error, which follows from how much the
ratios of all peers change from window to window (a quantile: one slow rank does not change it). So machines
whose ranks disturb each other raise no alarm, and a quiet cluster names a rank that is 5 % slow.

A rank that stands in line for a core computes longer, too. For some seconds that is the luck of the draw on a
busy machine, so the last steps are judged by what a rank needs more than its peers both with what all waited
for a core and without; only over minutes, with windows ten times as long, it counts like other slowness.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig

WINDOWS, WINDOW_STEPS = 8, 5
"""Newest windows of each rank that are judged, of so many steps as ranks tell of at a time."""
FLOOR = 0.03
"""Least excess over the peers that is named."""
SUSTAINED, SUSTAINED_WINDOWS = 0.5, 7
"""So many of the windows must show at least this share of the excess: some slow moments are no slow rank."""
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
PATIENT_WINDOWS, PATIENT_SECONDS = 10, 60.0
"""A long window has so many short ones, and at least so much time computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A slow rank."""

    rank: int
    excess: float
    """Over its peers; 0.05: it takes 5 % longer."""
    step: int
    peers: int
    """Ranks that it was compared with."""
    is_confirmed: bool = False
    """Whether it was slow in long windows, and not just in the last steps."""


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
class Ratios:
    """The newest ratios of every rank, window by window, and what to make of them."""

    _newest: dict[int, deque[float]] = field(default_factory=dict)
    _measured: dict[int, float] = field(default_factory=dict)
    _changes: dict[int, deque[float]] = field(default_factory=dict)
    """How much the logarithm of each rank's ratio changed from window to window: a rank of twice the time has
    twice the jitter, and is no reason to think less of the others."""
    _named: set[int] = field(default_factory=set)

    def add(self, rank: int, measured: float, judged: float) -> None:
        """One more window of a rank: its ratio as it was measured, which tells how noisy times are, and the
        one to judge it by."""
        changes = self._changes.setdefault(rank, deque(maxlen=MEMORY))
        if rank in self._measured:
            changes.append(abs(math.log(measured / self._measured[rank])))
        self._measured[rank] = measured
        self._newest.setdefault(rank, deque(maxlen=WINDOWS)).append(judged)

    def excess(self, rank: int, peers: Sequence[int]) -> float | None:
        """How much longer than its peers a rank takes; None when it is not slow, or was named before."""
        ratios = self._newest[rank]
        excess = statistics.median(ratios) - 1.0
        if excess < RECOVERED:
            self._named.discard(rank)
        if len(ratios) < WINDOWS or rank in self._named or excess < FLOOR:
            return None
        if sum(ratio > 1.0 + SUSTAINED * excess for ratio in ratios) < SUSTAINED_WINDOWS:
            return None
        if math.log1p(excess) < self._least(peers):
            return None
        self._named.add(rank)
        return excess

    def _least(self, ranks: Sequence[int]) -> float:
        """Logarithm of a ratio from which on it cannot be chance, by how much those of some ranks change."""
        sampled = ranks[:: -(-len(ranks) // MOST_SAMPLED)]
        changes = sorted(change for rank in sampled for change in self._changes.get(rank, ()))
        if not changes:
            return math.inf
        # The difference of two values scatters by sqrt(2) more than each.
        deviation = changes[int(QUANTILE * (len(changes) - 1))] / DEVIATIONS_AT_QUANTILE / math.sqrt(2.0)
        if deviation > NOISIEST:
            return math.inf
        least = ERRORS * ERROR_OF_MEDIAN * deviation / math.sqrt(WINDOWS)
        return max(least, NOISY_DEVIATIONS * deviation) if deviation > NOISY else least


@dataclass(slots=True)
class LongWindow:
    """The short windows of one rank that make up a long one."""

    seconds: float = 0.0
    ratios: list[float] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether it is long enough."""
        return len(self.ratios) >= PATIENT_WINDOWS and self.seconds >= PATIENT_SECONDS


@dataclass(slots=True)
class Stragglers:
    """Compute times of one attempt's ranks. `work_in` tells, for the first and the last step of a window,
    which ranks do the same in it."""

    work_in: Callable[[int, int], Work]
    _begun: set[int] = field(default_factory=set)
    """Ranks whose first window is over: it holds the first step, which compiles and allocates."""
    _open: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)
    _swift: Ratios = field(default_factory=Ratios)
    _patient: Ratios = field(default_factory=Ratios)
    _long: dict[int, LongWindow] = field(default_factory=dict)

    def observe(
        self, rank: int, step: int, seconds: float, steps: int = 1, waited: float = 0.0
    ) -> list[Straggler]:
        """Take in a rank's mean compute time of the window of some steps that ends with a step, and what it
        waited for a core in that time; return ranks that are now known to be slow and were not before."""
        if not (math.isfinite(seconds) and seconds > 0.0 and math.isfinite(waited)):
            return []
        if rank not in self._begun:
            self._begun.add(rank)
            return []
        window = self._open.setdefault(step, {})
        window[rank] = (seconds, waited)
        while len(self._open) > OPEN_WINDOWS:
            del self._open[min(self._open)]
        work = self.work_in(step - steps + 1, step)
        ranks = work.members.get(work.role_of.get(rank), ())
        if len(ranks) < 2 or not all(each in window for each in ranks):
            return []
        self._take_window({each: window[each] for each in ranks}, steps)
        return [found for each in ranks for found in self._look(each, ranks, step)]

    def _take_window(self, times: Mapping[int, tuple[float, float]], steps: int) -> None:
        total = sorted(seconds for seconds, _ in times.values())
        own = sorted(seconds - waited for seconds, waited in times.values())
        for rank, (seconds, waited) in times.items():
            usual = _median_without(total, seconds)
            # What it needs more than its peers, with what all waited for a core and without.
            more = min(seconds - usual, seconds - waited - _median_without(own, seconds - waited))
            self._swift.add(rank, seconds / usual, 1.0 + more / usual)
            long = self._long.setdefault(rank, LongWindow())
            long.ratios.append(seconds / usual)
            long.seconds += seconds * steps

    def _look(self, rank: int, ranks: Sequence[int], step: int) -> Iterator[Straggler]:
        peers, long = len(ranks) - 1, self._long[rank]
        if excess := self._swift.excess(rank, ranks):
            yield Straggler(rank=rank, excess=excess, step=step, peers=peers)
        if long.is_full:
            ratio = statistics.fmean(long.ratios)
            self._patient.add(rank, ratio, ratio)
            self._long[rank] = LongWindow()
            if excess := self._patient.excess(rank, ranks):
                yield Straggler(rank=rank, excess=excess, step=step, peers=peers, is_confirmed=True)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Median of the others."""
    others = list(ordered)
    others.remove(value)
    return statistics.median(others)


def confirmed_after(step_seconds: float) -> float:
    """Seconds after which a rank that computes so long for a step is known to stay slow, at the earliest."""
    return WINDOWS * max(PATIENT_SECONDS, PATIENT_WINDOWS * WINDOW_STEPS * step_seconds)


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
