"""Nothing fits: the nearest miss, what would make it fit, and the other rules that were broken."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.errors import Problem
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.layouts.engine_features import EngineFeatures
from llmtrain.plan.layouts.search import Refused, Search
from llmtrain.plan.plan import Candidate
from llmtrain.units import plural

_MOST_NODES = 64
"""How many times the nodes are worth a try."""


def nothing_fits(
    evaluator: Evaluator, recipe: Recipe, refused: Refused, nodes: int, features: EngineFeatures
) -> list[Problem]:
    """Problems of a search without a result, the nearest miss first."""
    problems = [
        Problem(rule, f"{refused.examples[rule].message} ({count} layouts)", refused.examples[rule].hint)
        for rule, count in sorted(refused.counts.items(), key=lambda item: -item[1])
        if rule != "memory" or refused.nearest is None
    ]
    head = Problem("plan", f"no layout fits on {plural(nodes, 'node')}: all {refused.total} are refused")
    if refused.nearest is None:
        return [head, *problems]
    miss = too_big(evaluator, evaluator.candidate(refused.nearest))
    enough = _enough_nodes(evaluator, recipe, nodes, features)
    hint = f"{enough} nodes are enough; or {miss.hint}" if enough else miss.hint
    return [head, Problem(miss.where, miss.message, hint), *problems]


def _enough_nodes(evaluator: Evaluator, recipe: Recipe, nodes: int, features: EngineFeatures) -> int | None:
    """Fewest nodes (by doubling, then halving the gap) on which something fits."""
    if recipe.parallel.dp != "auto":
        return None

    def fits(count: int) -> bool:
        machine = replace(evaluator.machine, nodes=count)
        return bool(Search(Evaluator(evaluator.work, machine), recipe, features).run(count).fitting)

    high = nodes * 2
    while not fits(high):
        high *= 2
        if high > nodes * _MOST_NODES:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def too_big(evaluator: Evaluator, candidate: Candidate) -> Problem:
    """A layout that does not fit: what it needs of what kind, and which knob saves how much."""
    layout, memory = candidate.layout, candidate.predicted.memory
    stage = evaluator.fullest(layout, candidate.accumulation).stage
    kinds = ("parameters", "gradients", "optimizer", "activations", "workspace")
    words = ", ".join(f"{kind} {getattr(memory, kind) / 1e9:.1f}" for kind in kinds)
    return Problem(
        "memory",
        f"nearest layout dp={layout.dp} tp={layout.tp} pp={layout.pp} cp={layout.cp} "
        f"micro={layout.micro_batch} zero={layout.zero} recompute={layout.recompute}: "
        f"stage {stage} needs {memory.total / 1e9:.1f} GB > {evaluator.usable_memory / 1e9:.1f} GB usable "
        f"of {memory.capacity / 1e9:.1f} GB ({words})",
        _savings(evaluator, candidate),
    )


def _savings(evaluator: Evaluator, candidate: Candidate) -> str:
    layout = candidate.layout
    changes: list[tuple[str, Layout]] = []
    if layout.recompute != "full":
        changes.append(("recompute full", replace(layout, recompute="full")))
    if layout.micro_batch > 1:
        changes.append(("micro-batch 1", replace(layout, micro_batch=1)))
    if layout.zero < 1:
        changes.append(("zero 1", replace(layout, zero=1)))
    found = []
    for words, changed in changes:
        need = evaluator.candidate(changed).predicted.memory.total
        if need < 0.99 * candidate.predicted.memory.total:
            found.append(f"{words} brings it to {need / 1e9:.1f} GB")
    return "; ".join(found) if found else "use more nodes or a smaller model"
