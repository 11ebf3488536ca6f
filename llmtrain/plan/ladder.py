"""The ladder: for every node count down to the loss budget a layout that fits, with the global batch kept
exactly.
"""

from __future__ import annotations

from math import ceil

from llmtrain.config.recipe import Recipe
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.layouts.search import Found, Search
from llmtrain.plan.plan import Candidate, Rung


def lowest_rung(nodes: int, budget: float) -> int:
    """Fewest nodes that a run may go on with: ceil((1 - budget) x nodes), at least 1."""
    return max(1, ceil(round((1.0 - budget) * nodes, 9)))


def make_ladder(
    evaluator: Evaluator,
    recipe: Recipe,
    search: Search,
    found: Found,
    *,
    nodes: int,
    usable: int,
    lowest: int | None = None,
) -> tuple[Rung, ...]:
    """Rungs from all nodes down to the loss budget, or to `lowest` nodes; while the chosen plan's ranks still
    fit, it stays.

    The budget is a share of the nodes at launch, which may be as few as the chosen plan uses.

    A rung first tries the best shapes of the search with fewer replicas, and searches anew when none of them
    fits.
    """
    rungs: list[Rung] = []
    current: Candidate | None = found.candidates[0]
    used = _nodes_used(evaluator, found.candidates[0])
    bottom = lowest_rung(used, recipe.faults.node_loss_budget)
    for count in range(nodes, (bottom if lowest is None else max(1, lowest)) - 1, -1):
        room = min(count, usable)
        if current is not None and current.layout.world_size > room * evaluator.machine.gpus_per_node:
            current = search.run_shapes(found.shapes, room) or _anew(search, room)
        rungs.append(_rung(evaluator, count, current))
    return tuple(rungs)


def _anew(search: Search, nodes: int) -> Candidate | None:
    found = search.run(nodes, free_replicas=True, kept=1)
    return found.candidates[0] if found.candidates else None


def _rung(evaluator: Evaluator, nodes: int, candidate: Candidate | None) -> Rung:
    if candidate is None:
        return Rung(nodes=nodes, candidate=None, idle_nodes=nodes, micro_batches=())
    used = _nodes_used(evaluator, candidate)
    split = candidate.layout.micro_batches(evaluator.work.global_batch)
    return Rung(nodes=nodes, candidate=candidate, idle_nodes=nodes - used, micro_batches=split)


def _nodes_used(evaluator: Evaluator, candidate: Candidate) -> int:
    return ceil(candidate.layout.world_size / evaluator.machine.gpus_per_node)
