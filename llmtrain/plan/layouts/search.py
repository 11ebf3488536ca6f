"""The search: constraints first, then memory, then time, over every legal layout of a recipe on a number of
nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.layouts.constraints import (
    BATCH_RULES,
    GATHERING_RULE,
    INTERLEAVING_RULE,
    Refusal,
    knob_refusals,
    refusals,
    too_big,
    too_many_ranks,
)
from llmtrain.plan.layouts.engine_features import EngineFeatures
from llmtrain.plan.layouts.points import Point, choose, pareto
from llmtrain.plan.layouts.space import Knobs, Space
from llmtrain.plan.plan import Candidate

_SHAPES = 48
Axes = tuple[int, int, int, int]
"""Degrees of tp, cp, ep and pp."""
_KEPT = 64
"""Most fitting layouts that are evaluated in full, fastest first."""


@dataclass(slots=True)
class Refused:
    """Layouts that were turned down, grouped by rule."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, Refusal] = field(default_factory=dict)
    nearest: Layout | None = None
    """The layout that missed the memory by least."""
    nearest_need: float = float("inf")
    """Bytes that it needs."""

    def add(self, refusal: Refusal, count: int = 1) -> None:
        """Count refusals; the first of each rule is kept as the example."""
        self.counts[refusal.rule] = self.counts.get(refusal.rule, 0) + count
        self.examples.setdefault(refusal.rule, refusal)

    def count(self, rule: str, example: Callable[[], Refusal]) -> None:
        """Count one refusal; its words are made for the first of each rule only."""
        if rule in self.counts:
            self.counts[rule] += 1
        else:
            self.add(example())

    @property
    def total(self) -> int:
        """All refusals."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    candidates: tuple[Candidate, ...]
    """Best first; the first is the choice among ties."""
    front: tuple[Candidate, ...]
    """The Pareto front: nothing is both faster and smaller; fastest first."""
    refused: Refused
    evaluated: int
    """Layouts looked at, refused ones included."""
    fitting: int
    shapes: tuple[Layout, ...] = ()
    """The fastest layouts, and the fastest of those that take any number of micro-batches: where the ladder
    starts.
    """


class Search:
    """Searches the layouts of one recipe with one evaluator."""

    def __init__(self, evaluator: Evaluator, recipe: Recipe, features: EngineFeatures) -> None:
        self._evaluator = evaluator
        self._recipe = recipe
        self._features = features
        self._space = Space(recipe, evaluator.work, evaluator.machine, features)

    def run(self, nodes: int, *, free_replicas: bool = False, kept: int = _KEPT) -> Found:
        """Search the layouts that use at most `nodes` nodes.

        `free_replicas` ignores a dp and an accumulation fixed by the recipe (the ladder: fewer nodes, same
        batch). `kept` limits the candidates, which are evaluated in full.
        """
        refused, points = Refused(), list[Point]()
        space, looked = self._space, 0
        room = nodes * self._evaluator.machine.gpus_per_node
        for tp in space.tensor:
            for cp in space.context:
                for ep in space.expert:
                    for pp in space.stages:
                        if tp * cp * pp > room and len(space.stages) > 1:
                            count = len(space.knobs(pp, tp)) * len(space.micro_batches)
                            refused.add(too_many_ranks(tp, cp, pp, room), count)
                            looked += count
                            continue
                        looked += self._axes((tp, cp, ep, pp), nodes, free_replicas, refused, points)
        points.sort(key=lambda point: point.seconds)
        return self._found(points, refused, looked, min(kept, _KEPT))

    def run_shapes(self, shapes: Sequence[Layout], nodes: int) -> Candidate | None:
        """The best of some layouts with as many replicas as `nodes` nodes hold; None when none of them
        fits.
        """
        points: list[Point] = []
        for shape in shapes:
            axes = (shape.tp, shape.cp, shape.ep, shape.pp)
            knobs = Knobs(shape.vpp, shape.schedule, shape.recompute, shape.sequence_parallel, shape.zero)
            for dp in self._replicas(axes, shape.micro_batch, nodes, free=True):
                if self._axis_refusal(_layout(axes, dp, shape.micro_batch, knobs), nodes, free=True) is None:
                    self._settings(axes, dp, shape.micro_batch, [knobs], refused=Refused(), points=points)
        points.sort(key=lambda point: point.seconds)
        choice = choose(points, self._memory)
        return self._evaluator.candidate(choice.layout) if choice else None

    def _axes(self, axes: Axes, nodes: int, free: bool, refused: Refused, points: list[Point]) -> int:
        """Look at all settings of fixed axes; return how many there were."""
        knobs = self._usable_knobs(axes, refused)
        looked = len(self._space.knobs(axes[3], axes[0])) - len(knobs)
        for micro in self._space.micro_batches:
            for dp in self._replicas(axes, micro, nodes, free):
                looked += len(knobs)
                if not knobs:
                    continue
                base = _layout(axes, dp, micro, knobs[0])
                broken = self._axis_refusal(base, nodes, free)
                if broken is None:
                    self._settings(axes, dp, micro, knobs, refused=refused, points=points)
                else:
                    refused.add(broken, len(knobs))
        return looked

    def _usable_knobs(self, axes: Axes, refused: Refused) -> list[Knobs]:
        """Settings that do not break a rule by themselves; whether an interleaved one may run depends on
        the batch.
        """
        usable = []
        for knobs in self._space.knobs(axes[3], axes[0]):
            layout = _layout(axes, 1, 1, knobs)
            broken = next(knob_refusals(self._evaluator.work, layout, self._features), None)
            if broken is None or broken.rule in BATCH_RULES:
                usable.append(knobs)
            else:
                refused.add(broken, len(self._space.micro_batches))
        return usable

    def _settings(
        self,
        axes: Axes,
        dp: int,
        micro: int,
        knobs: Sequence[Knobs],
        *,
        refused: Refused,
        points: list[Point],
    ) -> None:
        evaluator, total = self._evaluator, self._evaluator.work.global_batch // micro
        micro_batches, pp = ceil(total / dp), axes[3]
        even = total % dp == 0 and micro_batches % pp == 0
        model, limit = evaluator.memory_model, evaluator.usable_memory
        for knob in knobs:
            rule = INTERLEAVING_RULE if knob.vpp > 1 and not even else ""
            if knob.zero == 3 and total % dp:
                rule = GATHERING_RULE
            if rule:
                refused.count(rule, partial(self._uneven, axes, dp, micro, knob, rule))
                continue
            layout = _layout(axes, dp, micro, knob)
            need = model.least(layout, micro_batches)
            # A layout that is surely too big matters only as an example, or as the nearest miss.
            matters = "memory" not in refused.counts or (not points and need < refused.nearest_need)
            if matters or need <= limit < model.most(layout, micro_batches):
                need = model.need(layout, micro_batches)
            if need <= limit:
                points.append(Point(evaluator.seconds(layout, micro_batches), layout, micro_batches, need))
                continue
            if need < refused.nearest_need:
                refused.nearest, refused.nearest_need = layout, need
            refused.count("memory", lambda: too_big(need, limit))  # noqa: B023 (called at once)

    def _uneven(self, axes: Axes, dp: int, micro: int, knobs: Knobs, rule: str) -> Refusal:
        layout = _layout(axes, dp, micro, knobs)
        return next(r for r in knob_refusals(self._evaluator.work, layout, self._features) if r.rule == rule)

    def _replicas(self, axes: Axes, micro: int, nodes: int, free: bool) -> list[int]:
        wanted = self._recipe.parallel.dp
        if wanted != "auto" and not free:
            return [wanted]
        tp, cp, _, pp = axes
        return self._space.replicas(tp * cp * pp, self._evaluator.work.global_batch // micro, nodes)

    def _axis_refusal(self, layout: Layout, nodes: int, free: bool) -> Refusal | None:
        """A broken rule that no knob of the layout can mend."""
        evaluator = self._evaluator
        found = refusals(evaluator.work, layout, evaluator.machine, nodes, self._features)
        for refusal in found:
            if not refusal.of_knobs:
                return refusal
        return None if free else self._fixed_accumulation(layout)

    def _fixed_accumulation(self, layout: Layout) -> Refusal | None:
        wanted = self._recipe.batch.accumulation
        if wanted == "auto":
            return None
        product, batch = layout.dp * layout.micro_batch * wanted, self._evaluator.work.global_batch
        if product == batch:
            return None
        return Refusal(
            "batch product",
            f"dp {layout.dp} x micro {layout.micro_batch} x accumulation {wanted} = {product}, "
            f"but batch.global is {batch}",
            "set batch.accumulation to auto",
        )

    def _memory(self, point: Point) -> float:
        """Bytes that the fullest rank of a layout needs."""
        return self._evaluator.memory_model.need(point.layout, point.micro_batches)

    def _found(self, points: list[Point], refused: Refused, looked: int, kept: int) -> Found:
        choice = choose(points, self._memory)
        best = [choice] if choice else []
        best += [point for point in points[:kept] if point is not choice]
        candidates = tuple(self._evaluator.candidate(point.layout) for point in best)
        front = tuple(self._evaluator.candidate(point.layout) for point in pareto(points, self._memory))
        plain = [point for point in points if point.layout.vpp == 1]
        shapes = tuple(dict.fromkeys(point.layout for point in points[:_SHAPES] + plain[:_SHAPES]))
        return Found(candidates, front, refused, looked, len(points), shapes)


def _layout(axes: Axes, dp: int, micro: int, knobs: Knobs) -> Layout:
    return Layout(
        dp=dp,
        tp=axes[0],
        pp=axes[3],
        vpp=knobs.vpp,
        cp=axes[1],
        ep=axes[2],
        zero=knobs.zero,
        sequence_parallel=knobs.sequence_parallel,
        micro_batch=micro,
        schedule=knobs.schedule,
        recompute=knobs.recompute,
    )
