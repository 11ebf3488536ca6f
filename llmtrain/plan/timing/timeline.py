"""Who computes what when in one step of a pipeline: the schedules' order of passes, laid out in time. Pure.

Orders are those that the engine's schedules run. Passes of all stages are equally long here: a backward pass
takes two forward passes, or, where it is split as in a zero-bubble schedule, one for the inputs and one for
the weights. Time is counted in forward passes of a whole stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from typing import Literal, NamedTuple

Work = Literal["forward", "backward", "weight"]
"""`backward` is that of the inputs only where `weight` follows."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one chunk of layers; chunks count over the whole pipeline."""

    work: Work
    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A pass and its time."""

    done: Pass
    stage: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of a pipeline."""

    stages: int
    slots: tuple[Slot, ...]
    """In order of their start."""

    @property
    def length(self) -> float:
        """From the first pass to the end of the last one."""
        return max((slot.stop for slot in self.slots), default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """Idle share of all stages' time."""
        busy = sum(slot.stop - slot.start for slot in self.slots)
        return 1 - busy / (self.stages * self.length) if self.slots else 0.0


def order(schedule: str, stages: int, chunks: int, micro_batches: int, stage: int) -> tuple[Pass, ...]:
    """The passes of one stage in the order in which it runs them.

    After a number of forward passes that fills the pipeline, forward and backward passes take turns; the
    backward passes that are left drain it (Narayanan et al. 2021). With several chunks a stage works on a
    round of micro-batches for one chunk, then for the next. Zero bubble (Qi et al. 2024) puts the weight
    gradients off, by as many micro-batches as there are stages before this one. Empty where the number of
    micro-batches does not fit the schedule.
    """
    return tuple(_in_order(schedule, stages, chunks, micro_batches, stage))


def _in_order(schedule: str, stages: int, chunks: int, micro_batches: int, stage: int) -> Iterator[Pass]:
    total = chunks * micro_batches
    rounds = max(1, micro_batches // stages)
    if chunks > 1 and micro_batches % rounds:
        return
    per_round = micro_batches // rounds if chunks > 1 else micro_batches
    later = (stages - 1 - stage) * (2 if chunks > 1 and schedule != "zero-bubble" else 1)
    warm_up = min(total, later + (chunks - 1) * per_round)
    mine = range(stage, stages * chunks, stages)
    forward = _passes("forward", mine, per_round, total)
    backward = _passes("backward", mine[::-1], per_round, total)
    weight = _passes("weight", mine[::-1], per_round, total)
    yield from islice(forward, warm_up)
    for index in range(total):
        if warm_up + index < total:
            yield next(forward)
        yield next(backward)
        if schedule == "zero-bubble" and index >= stage:
            yield next(weight)
    if schedule == "zero-bubble":
        yield from weight


@lru_cache(maxsize=4096)
def fullest_passes(
    schedule: str, stages: int, chunks: int, micro_batches: int, stage: int
) -> tuple[Pass, ...]:
    """The first passes of a stage, up to where it has held as much as it ever does: the first backward pass,
    and where weight gradients are put off, the first of theirs.

    With fewer micro-batches than stages the engine runs all forward passes first.
    """
    if schedule == "1f1b" and chunks == 1 and micro_batches < stages:
        return (*(Pass("forward", stage, each) for each in range(micro_batches)), Pass("backward", stage, 0))
    ending = "weight" if schedule == "zero-bubble" and stages > 1 else "backward"
    found = []
    for one in _in_order(schedule, stages, chunks, micro_batches, stage):
        found.append(one)
        if one.work == ending:
            break
    return tuple(found)


@lru_cache(maxsize=4096)
def fullest_runs(
    schedule: str, stages: int, chunks: int, micro_batches: int, stage: int
) -> tuple[tuple[Work, int, int], ...]:
    """The same as runs of equal passes: work, chunk, how many."""
    if not micro_batches % stages or chunks == 1:  # more whole rounds begin alike
        micro_batches = min(micro_batches, 2 * stages)
    found = fullest_passes(schedule, stages, chunks, micro_batches, stage)
    return tuple(
        (work, chunk, len(list(run)))
        for (work, chunk), run in groupby(found, key=lambda one: (one.work, one.chunk))
    )


def _passes(work: Work, chunks: Sequence[int], per_round: int, total: int) -> Iterator[Pass]:
    """All passes of one kind, a round of micro-batches through each chunk in turn."""
    counts = dict.fromkeys(chunks, 0)
    for index in range(total):
        chunk = chunks[index // per_round % len(chunks)]
        yield Pass(work, chunk, counts[chunk])
        counts[chunk] += 1


def timeline(schedule: str, stages: int, chunks: int, micro_batches: int) -> Timeline:
    """One step, every pass as early as its order and the passes that it waits for allow; empty where the
    number of micro-batches does not fit the schedule."""
    orders = [order(schedule, stages, chunks, micro_batches, stage) for stage in range(stages)]
    seconds = _durations(schedule, chunks)
    ended: dict[Pass, float] = {}
    slots: list[Slot] = []
    places, clocks = [0] * stages, [0.0] * stages
    last = stages * chunks - 1
    moved = True
    while moved:
        moved = False
        for stage, passes in enumerate(orders):
            while places[stage] < len(passes):
                now = passes[places[stage]]
                waits_for = _before(now, last)
                if any(each not in ended for each in waits_for):
                    break
                start = max([clocks[stage], *(ended[each] for each in waits_for)])
                clocks[stage] = ended[now] = start + seconds[now.work]
                slots.append(Slot(now, stage, start, clocks[stage]))
                places[stage] += 1
                moved = True
    complete = all(place == len(passes) for place, passes in zip(places, orders, strict=True))
    ordered = tuple(sorted(slots, key=lambda slot: (slot.start, slot.stage)))
    return Timeline(stages=stages, slots=ordered if complete else ())


def _durations(schedule: str, chunks: int) -> dict[Work, float]:
    backward = 1.0 if schedule == "zero-bubble" else 2.0
    return {"forward": 1 / chunks, "backward": backward / chunks, "weight": 1 / chunks}


def _before(now: Pass, last: int) -> tuple[Pass, ...]:
    """Passes whose results a pass needs."""
    if now.work == "forward":
        return (Pass("forward", now.chunk - 1, now.micro_batch),) if now.chunk else ()
    own = Pass("forward" if now.work == "backward" else "backward", now.chunk, now.micro_batch)
    if now.work == "backward" and now.chunk < last:
        return own, Pass("backward", now.chunk + 1, now.micro_batch)
    return (own,)
