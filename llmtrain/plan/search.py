"""The search: constraints first, then memory, then time, over every legal layout of a recipe on a number of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, cast

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import MicroRange, Recipe
from llmtrain.plan.constraints import Refusal, refusals
from llmtrain.plan.engine_features import EngineFeatures
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.plan import Candidate

TIE = 0.02
"""Plans whose predicted steps differ by less than this share are equal: two similar plans are compared much better than one is predicted."""
_LARGEST_MICRO_BATCH = 64
_LARGEST_CHUNKS = 12


@dataclass(slots=True)
class Refused:
    """Layouts that were turned down, grouped by rule."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, Refusal] = field(default_factory=dict)
    nearest: Candidate | None = None
    """The layout that missed the memory by least."""

    def add(self, refusal: Refusal) -> None:
        """Count one refusal; the first of each rule is kept as the example."""
        self.counts[refusal.rule] = self.counts.get(refusal.rule, 0) + 1
        self.examples.setdefault(refusal.rule, refusal)

    @property
    def total(self) -> int:
        """All refusals."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    candidates: tuple[Candidate, ...]
    """Best first; the first is the choice among ties."""
    refused: Refused
    evaluated: int


def search(
    evaluator: Evaluator,
    recipe: Recipe,
    nodes: int,
    features: EngineFeatures,
    *,
    free_replicas: bool = False,
    shapes: Sequence[Layout] | None = None,
) -> Found:
    """Search the layouts that use at most `nodes` nodes.

    `free_replicas` ignores a dp and an accumulation fixed by the recipe (the ladder: fewer nodes, same global batch).
    `shapes` limits the search to these layouts with another dp.
    """
    refused, fitting = Refused(), []
    evaluated = 0
    source = _shapes(evaluator, recipe, features) if shapes is None else iter(shapes)
    for shape in source:
        for layout in _with_replicas(evaluator, recipe, shape, nodes, free_replicas):
            evaluated += 1
            candidate = _evaluate(evaluator, recipe, layout, nodes, features, refused, free_replicas)
            if candidate is not None:
                fitting.append(candidate)
    return Found(tuple(ranked(fitting)), refused, evaluated)


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Fastest first, but the first place goes to the simplest among those within the model's error of the fastest."""
    order = sorted(candidates, key=lambda c: c.predicted.step_seconds)
    if not order:
        return order
    limit = order[0].predicted.step_seconds * (1.0 + TIE)
    ties = [c for c in order if c.predicted.step_seconds <= limit]
    choice = min(ties, key=_complexity)
    return [choice, *(c for c in order if c is not choice)]


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    layout, memory = candidate.layout, candidate.predicted.memory
    axes = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep))
    settings = (layout.vpp > 1) + (layout.zero > 1) + {"none": 0, "selective": 1, "full": 2}[layout.recompute]
    settings += layout.schedule == "zero-bubble"
    tight = max(0.0, memory.total / memory.capacity - 0.90)
    return (round(tight, 2), axes + settings, layout.pp, layout.vpp, candidate.predicted.step_seconds)


def _evaluate(
    evaluator: Evaluator,
    recipe: Recipe,
    layout: Layout,
    nodes: int,
    features: EngineFeatures,
    refused: Refused,
    free_replicas: bool,
) -> Candidate | None:
    broken = next(refusals(evaluator.work, layout, evaluator.machine, nodes, features), None)
    if broken is None and not free_replicas:
        broken = _fixed_accumulation(evaluator, recipe, layout)
    if broken is not None:
        refused.add(broken)
        return None
    micro_batches = max(layout.micro_batches(evaluator.work.global_batch))
    memory = evaluator.memory(layout, micro_batches)
    if memory.total > evaluator.usable_memory:
        need, have = memory.total / 1e9, evaluator.usable_memory / 1e9
        refused.add(Refusal("memory", f"{need:.1f} GB > {have:.1f} GB usable on the fullest rank"))
        nearest = refused.nearest
        if nearest is None or memory.total < nearest.predicted.memory.total:
            refused.nearest = evaluator.candidate(layout)
        return None
    return evaluator.candidate(layout)


def _fixed_accumulation(evaluator: Evaluator, recipe: Recipe, layout: Layout) -> Refusal | None:
    wanted = recipe.batch.accumulation
    if wanted == "auto":
        return None
    product = layout.dp * layout.micro_batch * wanted
    if product == evaluator.work.global_batch:
        return None
    return Refusal(
        "batch product",
        f"dp {layout.dp} x micro {layout.micro_batch} x accumulation {wanted} = {product}, "
        f"but batch.global is {evaluator.work.global_batch}",
        "set batch.accumulation to auto",
    )


# ---- the space ----------------------------------------------------------------------------------
def _shapes(evaluator: Evaluator, recipe: Recipe, features: EngineFeatures) -> Iterator[Layout]:
    """All layouts but for dp, which is 1 here."""
    work, machine, fixed = evaluator.work, evaluator.machine, recipe.parallel
    tensor = _choices(fixed.tp, [d for d in _divisors(machine.gpus_per_node) if work.shape.heads % d == 0])
    stages = _choices(fixed.pp, _stage_counts(work.model.layers, features))
    for tp in tensor:
        for cp in _choices(fixed.cp, _context_degrees(work.sequence, features)):
            for ep in _choices(fixed.ep, _expert_degrees(work.shape.experts, features)):
                for pp in stages:
                    room = machine.nodes * machine.gpus_per_node // max(1, tp * cp * pp)
                    if room < 1 and "auto" in (fixed.tp, fixed.cp, fixed.pp):
                        continue
                    yield from _settings(evaluator, recipe, features, Layout(tp=tp, cp=cp, ep=ep, pp=pp))


def _settings(
    evaluator: Evaluator, recipe: Recipe, features: EngineFeatures, axes: Layout
) -> Iterator[Layout]:
    """The knobs that go with fixed axes."""
    fixed = recipe.parallel
    zero = _choices(fixed.zero, [z for z in (1, 2, 3) if z in features.zero] or list(features.zero))
    sequence: Sequence[Any] = [True] if features.sequence_parallel and axes.tp > 1 else [False]
    for vpp in _choices(fixed.vpp, _chunk_counts(evaluator.work.model.layers, axes.pp, features)):
        for schedule in _schedules(recipe, features, axes.pp, vpp):
            for recompute in _choices(fixed.recompute, list(features.recompute)):
                for sequence_parallel in _choices(fixed.sequence_parallel, sequence):
                    for stage in zero:
                        for micro in _micro_batches(recipe, evaluator.work.global_batch):
                            yield replace(
                                axes,
                                vpp=vpp,
                                schedule=cast(Any, schedule),
                                recompute=recompute,
                                sequence_parallel=sequence_parallel,
                                zero=stage,
                                micro_batch=micro,
                            )


def _with_replicas(
    evaluator: Evaluator, recipe: Recipe, shape: Layout, nodes: int, free: bool
) -> Iterator[Layout]:
    """The shape with the most replicas that fit, and with the most that split the batch evenly."""
    wanted = recipe.parallel.dp
    if wanted != "auto" and not free:
        yield replace(shape, dp=wanted)
        return
    node = evaluator.machine.gpus_per_node
    ranks = shape.tp * shape.pp * shape.cp
    most = nodes * node // ranks
    grain = node // gcd(ranks, node)
    total = evaluator.work.global_batch // shape.micro_batch
    most = min(most, max(total, 1))
    largest = most // grain * grain if most >= grain else most
    if largest < 1:
        yield replace(shape, dp=1)
        return
    yield replace(shape, dp=largest)
    even = next((d for d in range(largest - largest % grain, 0, -grain) if total % d == 0), 0)
    if even and even != largest:
        yield replace(shape, dp=even)


def _schedules(recipe: Recipe, features: EngineFeatures, pp: int, vpp: int) -> Sequence[str]:
    if recipe.parallel.schedule != "auto":
        return [recipe.parallel.schedule]
    if vpp > 1:
        return ["interleaved"]
    plain = [s for s in features.schedules if s != "interleaved"]
    return plain if pp > 1 else plain[:1]


def _choices(fixed: Any, free: Sequence[Any]) -> Sequence[Any]:
    return free if fixed == "auto" else [fixed]


def _stage_counts(layers: int, features: EngineFeatures) -> list[int]:
    if not features.uneven_layers:
        return _divisors(layers)
    return sorted({*_divisors(layers), *_divisors(layers + 2)} - {layers + 2})


def _chunk_counts(layers: int, pp: int, features: EngineFeatures) -> list[int]:
    if pp == 1 or "interleaved" not in features.schedules:
        return [1]
    per_stage = layers // pp if layers % pp == 0 else (layers + 2) // pp
    return [v for v in _divisors(per_stage) if v <= _LARGEST_CHUNKS]


def _context_degrees(sequence: int, features: EngineFeatures) -> list[int]:
    if not features.context_parallel:
        return [1]
    return [d for d in (1, 2, 4, 8, 16) if d == 1 or sequence // d >= 2048]


def _expert_degrees(experts: int, features: EngineFeatures) -> list[int]:
    return _divisors(experts) if features.expert_parallel and experts > 1 else [1]


def _micro_batches(recipe: Recipe, global_batch: int) -> list[int]:
    wanted = recipe.batch.micro
    if isinstance(wanted, int):
        return [wanted]
    low, high = (wanted.min, wanted.max) if isinstance(wanted, MicroRange) else (1, _LARGEST_MICRO_BATCH)
    return [b for b in _divisors(global_batch) if low <= b <= high] or [low]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
