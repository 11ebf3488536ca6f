"""The space of layouts that a recipe leaves open: every choice of every axis and knob, as values or fixed
by the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

from llmtrain.config.layout import Recompute, Schedule
from llmtrain.config.recipe import MicroRange, Recipe
from llmtrain.plan.layouts.engine_features import EngineFeatures
from llmtrain.plan.machine import Machine
from llmtrain.plan.workload import Workload

_LARGEST_MICRO_BATCH = 64
_LARGEST_CHUNKS = 16
_SHORTEST_PART = 1024
"""Tokens of a sequence that a context-parallel rank should still have."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What goes with the axes."""

    vpp: int
    schedule: Schedule
    recompute: Recompute
    sequence_parallel: bool
    zero: Literal[0, 1, 2, 3]


class Space:
    """The choices of one recipe on one machine with one engine."""

    def __init__(self, recipe: Recipe, work: Workload, machine: Machine, features: EngineFeatures) -> None:
        self._fixed = recipe.parallel
        self._work = work
        self._machine = machine
        self._features = features
        self._knobs: dict[tuple[int, bool], list[Knobs]] = {}
        self.micro_batches = _micro_batches(recipe, work.global_batch)
        self.tensor = _choices(self._fixed.tp, divisors(machine.gpus_per_node))
        self.context = _choices(self._fixed.cp, self._context_degrees())
        self.expert = _choices(self._fixed.ep, self._expert_degrees())
        self.stages = _choices(self._fixed.pp, self._stage_counts())

    def knobs(self, pp: int, tp: int) -> Sequence[Knobs]:
        """The settings that go with pipeline and tensor degrees."""
        key = (pp, tp > 1)
        found = self._knobs.get(key)
        if found is None:
            found = self._knobs[key] = list(self._settings(pp, tp > 1))
        return found

    def _settings(self, pp: int, split: bool) -> Iterator[Knobs]:
        fixed, features = self._fixed, self._features
        # Norms and residuals in parts need less memory and time at equal traffic, but for CPU ranks, whose
        # every further call costs.
        free_sp = [True] if features.sequence_parallel and split else [False]
        if self._machine.is_cpu and split and features.sequence_parallel:
            free_sp = [False, True]
        # In a pipeline, gradients or weights would move in every one of its many micro-batches.
        worth = (1, 2, 3) if pp == 1 else (1,)
        zero = _choices(fixed.zero, [z for z in worth if z in features.zero] or list(features.zero))
        for vpp, schedule in self._schedules(pp):
            for recompute in _choices(fixed.recompute, list(features.recompute)):
                for sequence_parallel in _choices(fixed.sequence_parallel, free_sp):
                    for stage in zero:
                        yield Knobs(vpp, schedule, recompute, sequence_parallel, stage)

    def _schedules(self, pp: int) -> Iterator[tuple[int, Schedule]]:
        fixed, features = self._fixed, self._features
        for vpp in _choices(fixed.vpp, self._chunk_counts(pp)):
            if fixed.schedule != "auto":
                names: list[Schedule] = [fixed.schedule]
            elif vpp > 1:
                names = ["interleaved"]
            else:
                names = [s for s in features.schedules if s != "interleaved"] if pp > 1 else ["1f1b"]
            for name in names:
                if fixed.vpp != "auto" or fixed.schedule == "auto" or (vpp > 1) == (name == "interleaved"):
                    yield vpp, name

    def _chunk_counts(self, pp: int) -> list[int]:
        if pp == 1 or "interleaved" not in self._features.schedules:
            return [1]
        layers = self._work.model.layers
        counts = {v for total in self._layer_totals() if total % pp == 0 for v in divisors(total // pp)}
        return sorted(v for v in counts | {1} if v <= _LARGEST_CHUNKS and v * pp <= layers)

    def _stage_counts(self) -> list[int]:
        world = self._machine.nodes * self._machine.gpus_per_node
        counts = {p for total in self._layer_totals() for p in divisors(total)}
        return sorted(p for p in counts if p <= min(world, self._work.model.layers))

    def _layer_totals(self) -> tuple[int, ...]:
        """Layers, and where chunks may differ also layers with the embedding and the head counted as one
        each.
        """
        layers = self._work.model.layers
        return (layers, layers + 2) if self._features.uneven_layers else (layers,)

    def _context_degrees(self) -> list[int]:
        if not self._features.context_parallel:
            return [1]
        longest = self._work.sequence // _SHORTEST_PART
        return [d for d in (1, 2, 4, 8, 16, 32) if d == 1 or d <= longest]

    def _expert_degrees(self) -> list[int]:
        experts = self._work.shape.experts
        return divisors(experts) if self._features.expert_parallel and experts > 1 else [1]

    def replicas(self, ranks: int, total: int, nodes: int) -> list[int]:
        """Data-parallel degrees worth a look for `ranks` of one replica and `total` micro-batches.

        The most that fit in whole nodes, and the most that split the micro-batches evenly.
        """
        node = self._machine.gpus_per_node
        most = min(nodes * node // ranks, max(total, 1))
        grain = node // gcd(ranks, node)
        if most < 1:
            return [1]
        largest = most // grain * grain if most >= grain else most
        even = next((d for d in range(largest - largest % grain, 0, -grain) if total % d == 0), 0)
        return [largest, even] if even and even != largest else [largest]


def _choices(fixed: Any, free: Sequence[Any]) -> Sequence[Any]:
    return free if fixed == "auto" else [fixed]


def _micro_batches(recipe: Recipe, global_batch: int) -> list[int]:
    wanted = recipe.batch.micro
    if isinstance(wanted, int):
        return [wanted]
    low, high = (wanted.min, wanted.max) if isinstance(wanted, MicroRange) else (1, _LARGEST_MICRO_BATCH)
    return [b for b in divisors(global_batch) if low <= b <= high] or [low]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
