"""`make_plan`: from a job spec to the plans, the ladder and the problems. Pure: no clock, network or
environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmtrain.config.job import JobSpec
from llmtrain.config.layout import Layout
from llmtrain.errors import InfeasibleError, Problem
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.ladder import make_ladder
from llmtrain.plan.layouts.constraints import refusals
from llmtrain.plan.layouts.engine_features import OWN_ENGINE, EngineFeatures
from llmtrain.plan.layouts.nearest_miss import nothing_fits, too_big
from llmtrain.plan.layouts.search import Found, Refused, Search
from llmtrain.plan.machine import make_machine
from llmtrain.plan.memory.host_memory import too_few_nodes
from llmtrain.plan.model_size import model_size
from llmtrain.plan.plan import Candidate, Plan, RefusedGroup, Reliability, Rung
from llmtrain.plan.reliability import reliability
from llmtrain.plan.request import proposals, request_problems
from llmtrain.plan.trust import doubts, error_band, optimism
from llmtrain.plan.workload import make_workload


def make_plan(
    spec: JobSpec,
    *,
    layout: Layout | None = None,
    nodes: int | None = None,
    top: int = 5,
    features: EngineFeatures = OWN_ENGINE,
    lowest: int | None = None,
) -> Plan:
    """Plan a job: search all layouts, or evaluate the one given.

    `nodes` plans for so many nodes instead of the profile's; `features` is what the engine that will run it
    can do; `lowest` is the number of nodes that the ladder goes down to, by default what the budget allows.
    Raises InfeasibleError when nothing fits, ConfigError when the profile's figures cannot be used.
    """
    cluster = spec.cluster if nodes is None else replace(spec.cluster, nodes=nodes, spares=0)
    evaluator = make_evaluator(replace(spec, cluster=cluster))
    usable = cluster.nodes - cluster.spares
    search = Search(evaluator, spec.recipe, features)
    if layout is None:
        found = _searched(search, evaluator, spec, usable, features, top)
    else:
        fixed = _fixed(evaluator, layout, usable, features)
        found = Found((fixed,), (fixed,), Refused(), 1, 1, (layout,))
    ladder = make_ladder(
        evaluator, spec.recipe, search, found, nodes=cluster.nodes, usable=usable, lowest=lowest
    )
    size, best = model_size(spec.recipe.model), found.candidates[0]
    failures = reliability(best, size.parameters, cluster, spec.recipe.checkpoint)
    return Plan(
        model=size,
        plans=tuple(evaluator.with_wire_bytes(candidate) for candidate in found.candidates[:top]),
        ladder=ladder,
        problems=(
            *request_problems(spec.recipe, evaluator.machine),
            *_tight_memory(evaluator, best),
            *_missing_features(features, best),
            *_doubtful_prediction(evaluator, best, size.parameters),
            *doubts(evaluator.machine, cluster, evaluator.work.mode),
            *_empty_rungs(ladder),
            *_short_host_memory(evaluator, spec, best, failures),
        ),
        front=found.front,
        refused=_groups(found.refused),
        evaluated=found.evaluated,
        reliability=failures,
        gpus_per_node=evaluator.machine.gpus_per_node,
        proposals=tuple(proposals(spec.recipe, evaluator.machine, features, evaluator.error)),
    )


def make_evaluator(spec: JobSpec) -> Evaluator:
    """The evaluator of a job; raises ConfigError when the profile's figures cannot be used."""
    machine = make_machine(spec.cluster)
    band = error_band(machine, spec.cluster.calibration)
    return Evaluator(make_workload(spec.recipe, machine.software.framework), machine, band)


def _searched(  # noqa: PLR0917
    search: Search, evaluator: Evaluator, spec: JobSpec, nodes: int, features: EngineFeatures, top: int
) -> Found:
    found = search.run(nodes, kept=top)
    if not found.candidates:
        raise InfeasibleError(nothing_fits(evaluator, spec.recipe, found.refused, nodes, features))
    return found


def _fixed(evaluator: Evaluator, layout: Layout, nodes: int, features: EngineFeatures) -> Candidate:
    broken = list(refusals(evaluator.work, layout, evaluator.machine, nodes, features))
    impossible = [r for r in broken if r.rule != "engine"]
    if impossible:
        raise InfeasibleError([Problem(f"layout: {r.rule}", r.message, r.hint) for r in impossible])
    candidate = evaluator.candidate(layout)
    memory = candidate.predicted.memory
    if memory.total > memory.capacity:
        raise InfeasibleError([too_big(evaluator, candidate)])
    return candidate


def _groups(refused: Refused) -> tuple[RefusedGroup, ...]:
    ordered = sorted(refused.counts.items(), key=lambda item: -item[1])
    return tuple(
        RefusedGroup(
            rule=rule,
            count=count,
            example=refused.examples[rule].message,
            hint=refused.examples[rule].hint,
        )
        for rule, count in ordered
    )


# ---- what a person should know although the plan works
def _tight_memory(evaluator: Evaluator, best: Candidate) -> Iterator[Problem]:
    memory = best.predicted.memory
    if memory.total > evaluator.usable_memory:
        free = 1.0 - memory.total / memory.capacity
        yield Problem(
            "memory",
            f"{memory.total / 1e9:.1f} GB of {memory.capacity / 1e9:.1f} GB leaves "
            f"{100 * free:.1f} % < 4 % free",
            "use recompute or a smaller micro-batch",
        )


def _missing_features(features: EngineFeatures, best: Candidate) -> Iterator[Problem]:
    for setting in features.missing(best.layout):
        yield Problem(
            "layout", f"the engine cannot run {setting}: `launch` will refuse it", "leave it to auto"
        )


def _doubtful_prediction(evaluator: Evaluator, best: Candidate, parameters: int) -> Iterator[Problem]:
    if warning := optimism(best, evaluator.machine, parameters, evaluator.work.mode):
        yield Problem("prediction", warning, "calibrate the profile: `llmtrain profiles calibrate`")


def _empty_rungs(ladder: tuple[Rung, ...]) -> Iterator[Problem]:
    empty = [str(rung.nodes) for rung in ladder if rung.candidate is None]
    if empty:
        counts = f"{', '.join(empty)} {'node' if empty == ['1'] else 'nodes'}"
        yield Problem(
            "ladder",
            f"nothing fits on {counts}: a run that loses so many stops",
            "lower faults.node_loss_budget, or use recompute",
        )


def _short_host_memory(
    evaluator: Evaluator, spec: JobSpec, best: Candidate, failures: Reliability
) -> Iterator[Problem]:
    """Too few nodes for the copies of snapshots, or too little memory in them."""
    if too_few := too_few_nodes(spec.recipe.checkpoint, best.layout, spec.cluster.gpus_per_node):
        yield too_few
    host = evaluator.machine.host_memory
    if host is not None and not evaluator.machine.is_cpu and failures.host_bytes_per_node > 0.5 * host:
        yield Problem(
            "host memory",
            f"copies of a node's states take {failures.host_bytes_per_node / 1e9:.0f} GB, "
            f"more than half of {host / 1e9:.0f} GB",
            "use fewer checkpoint.memory.copies, or checkpoint.incremental: 0",
        )
