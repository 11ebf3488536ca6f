"""`make_plan`: from a job spec to the plans, the ladder and the problems. Pure: no clock, no network, no environment."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.config.job import JobSpec
from llmtrain.config.layout import Layout
from llmtrain.errors import InfeasibleError, Problem
from llmtrain.plan.constraints import refusals
from llmtrain.plan.engine_features import OWN_ENGINE, EngineFeatures
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.ladder import make_ladder
from llmtrain.plan.machine import make_machine
from llmtrain.plan.model_size import model_size
from llmtrain.plan.plan import Candidate, Plan, Rung
from llmtrain.plan.search import Found, Refused, Search
from llmtrain.plan.workload import make_workload


def make_plan(
    spec: JobSpec,
    *,
    layout: Layout | None = None,
    nodes: int | None = None,
    top: int = 5,
    features: EngineFeatures = OWN_ENGINE,
) -> Plan:
    """Plan a job: search all layouts, or evaluate the one given.

    `nodes` plans for so many nodes instead of the profile's; `features` is what the engine that will run it can do.
    Raises InfeasibleError when nothing fits, ConfigError when the profile's figures cannot be used.
    """
    cluster = spec.cluster if nodes is None else replace(spec.cluster, nodes=nodes, spares=0)
    evaluator = Evaluator(make_workload(spec.recipe), make_machine(cluster))
    usable = cluster.nodes - cluster.spares
    searcher = Search(evaluator, spec.recipe, features)
    if layout is not None:
        found = Found((_fixed(evaluator, layout, usable, features),), (), Refused(), 1, 1, (layout,))
    else:
        found = searcher.run(usable)
        if not found.candidates:
            raise InfeasibleError(_nothing_fits(evaluator, found.refused))
    best = found.candidates[0]
    ladder = make_ladder(evaluator, spec.recipe, searcher, found, cluster.nodes, usable)
    return Plan(
        model=model_size(spec.recipe.model),
        plans=found.candidates[:top],
        ladder=ladder,
        problems=tuple(_remarks(evaluator, best, ladder)),
    )


def _fixed(evaluator: Evaluator, layout: Layout, nodes: int, features: EngineFeatures) -> Candidate:
    broken = list(refusals(evaluator.work, layout, evaluator.machine, nodes, features))
    impossible = [r for r in broken if r.rule != "engine"]
    if impossible:
        raise InfeasibleError([Problem(f"layout: {r.rule}", r.message, r.hint) for r in impossible])
    candidate = evaluator.candidate(layout)
    memory = candidate.predicted.memory
    if memory.total > memory.capacity:
        raise InfeasibleError([_too_big(candidate)])
    return candidate


def _nothing_fits(evaluator: Evaluator, refused: Refused) -> list[Problem]:
    problems = [
        Problem(rule, f"{refused.examples[rule].message} ({count} layouts)", refused.examples[rule].hint)
        for rule, count in sorted(refused.counts.items(), key=lambda item: -item[1])
    ]
    head = Problem("", f"no feasible plan: all {refused.total} layouts are refused")
    if refused.nearest is not None:
        nearest = evaluator.candidate(refused.nearest)
        return [head, _too_big(nearest), *(p for p in problems if p.where != "memory")]
    return [head, *problems]


def _too_big(candidate: Candidate) -> Problem:
    memory, layout = candidate.predicted.memory, candidate.layout
    need, have = memory.total / 1e9, memory.capacity / 1e9
    return Problem(
        "memory",
        f"nearest layout dp={layout.dp} tp={layout.tp} pp={layout.pp} micro={layout.micro_batch} "
        f"recompute={layout.recompute} needs {need:.1f} GB > {have:.1f} GB a rank",
        "use more nodes, recompute, a smaller micro-batch or a smaller model",
    )


def _remarks(evaluator: Evaluator, best: Candidate, ladder: tuple[Rung, ...]) -> list[Problem]:
    remarks = []
    memory = best.predicted.memory
    if memory.total > evaluator.usable_memory:
        remarks.append(
            Problem(
                "memory",
                f"{memory.total / 1e9:.1f} GB of {memory.capacity / 1e9:.1f} GB leaves less than 4 % free",
                "use recompute or a smaller micro-batch",
            )
        )
    empty = [rung.nodes for rung in ladder if rung.candidate is None]
    if empty:
        remarks.append(Problem("ladder", f"nothing fits on {', '.join(map(str, empty))} nodes"))
    return remarks
