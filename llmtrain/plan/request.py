"""A request checked: which of its numbers contradict each other, the schedule or the memory, and what comes
nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig, ParallelConfig, Recipe, RequestConfig
from llmtrain.errors import Problem
from llmtrain.hardware import GB
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.layouts.engine_features import EngineFeatures
from llmtrain.plan.layouts.points import TIE
from llmtrain.plan.layouts.search import Search
from llmtrain.plan.machine import Machine
from llmtrain.plan.plan import Candidate, Proposal
from llmtrain.plan.timing.schedules import bubble_ratio
from llmtrain.plan.workload import make_workload
from llmtrain.units import percent


def request_problems(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Yield every contradiction in a recipe's request, with both numbers and the knob that mends it."""
    request = recipe.request
    if request is None:
        return
    yield from _batch(request, recipe.model.sequence)
    yield from _bubble(request, recipe.model.layers)
    yield from _memory(request, recipe, machine)


def _batch(request: RequestConfig, sequence: int) -> Iterator[Problem]:
    product = request.dp * request.micro * request.accumulation
    if product == request.global_size:
        return
    replica = request.dp * request.micro
    needed = -(-request.global_size // replica)
    in_tokens = request.global_size / sequence
    few = f"; read as tokens it is {in_tokens:g} sequences, fewer than one micro-batch a replica ({replica})"
    yield Problem(
        "request.global",
        f"dp {request.dp} x micro {request.micro} x accumulation {request.accumulation} = {product} "
        f"sequences, not {request.global_size}{few if in_tokens < replica else ''}",
        f"set accumulation to {needed} ({needed * replica * sequence / 1e6:.1f} M tokens a step), "
        f"or global to {product} ({product * sequence / 1e6:.2f} M tokens)",
    )


def _bubble(request: RequestConfig, layers: int) -> Iterator[Problem]:
    idle = bubble_ratio("1f1b", request.pp, 1, request.accumulation)
    if idle <= request.bubble:
        return
    fill, most = request.pp - 1, request.bubble
    work = fill * (1.0 - most) / most  # v x m that brings the idle share down to the limit
    chunks = [v for v in range(2, layers // request.pp + 1) if layers % (v * request.pp) == 0]
    enough = next((v for v in chunks if v * request.accumulation >= work), None)
    needed = ceil(round(work, 9))
    interleaved = (
        f"vpp to {enough} ({percent(fill / (enough * request.accumulation + fill))}), or " if enough else ""
    )
    yield Problem(
        "request.bubble",
        f"1F1B idles (pp - 1)/(accumulation + pp - 1) = {fill}/{request.accumulation + fill} = "
        f"{percent(idle)} > {percent(most)}",
        f"set {interleaved}accumulation to at least {needed} ({percent(fill / (needed + fill))})",
    )


def _memory(request: RequestConfig, recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    evaluator = _evaluator(recipe, request, machine)
    needs = {}
    for recompute in ("none", "selective", "full"):
        layout = _requested(request, recompute)
        found = evaluator.fullest(layout, request.accumulation)
        needs[recompute] = (found.stage, found.total)
    stage, need = needs["selective"]
    capacity = machine.capacity
    if need <= evaluator.usable_memory:
        return
    words = ", ".join(f"{name} {total / GB:.0f} GB" for name, (_, total) in needs.items())
    fits = next((name for name, (_, total) in needs.items() if total <= evaluator.usable_memory), None)
    yield Problem(
        "request.micro",
        f"stage {stage} needs {need / GB:.0f} GB > {capacity / GB:.0f} GB with micro {request.micro} "
        f"(recompute {words}; sequence parallel, ZeRO-1)",
        (f"recompute {fits} fits, but idles as above; " if fits else "")
        + "lower micro, the batch stays the same",
    )


def _requested(request: RequestConfig, recompute: str) -> Layout:
    return Layout(
        dp=request.dp,
        tp=request.tp,
        pp=request.pp,
        zero=1,
        sequence_parallel=request.tp > 1,
        micro_batch=request.micro,
        recompute=recompute,  # type: ignore[arg-type]
    )


def _evaluator(recipe: Recipe, request: RequestConfig, machine: Machine) -> Evaluator:
    product = request.dp * request.micro * request.accumulation
    asked = replace(recipe, batch=BatchConfig(global_size=product))
    return Evaluator(make_workload(asked, machine.software.framework), machine)


def proposals(recipe: Recipe, machine: Machine, features: EngineFeatures, error: float) -> Iterator[Proposal]:
    """Yield the nearest plans that work: the same degrees at both readings of the batch, and a better layout.

    `error` is the half-width of the band around predicted steps.
    """
    request = recipe.request
    if request is None:
        return
    product = request.dp * request.micro * request.accumulation
    degrees = ParallelConfig(dp=request.dp, tp=request.tp, pp=request.pp)

    def find(parallel: ParallelConfig, batch: int) -> Candidate | None:
        relaxed = replace(recipe, parallel=parallel, batch=BatchConfig(global_size=batch))
        evaluator = Evaluator(make_workload(relaxed, machine.software.framework), machine, error)
        found = Search(evaluator, relaxed, features).run(machine.nodes)
        return next((c for c in found.candidates if c.predicted.bubble_ratio <= request.bubble), None)

    near = find(degrees, product)
    if near is not None:
        yield Proposal(title=f"same degrees, {product} sequences", candidate=near)
    free = find(ParallelConfig(), product)
    if free is not None and (near is None or _seconds(free) < (1.0 - TIE) * _seconds(near)):
        yield Proposal(title=f"other degrees, {product} sequences", candidate=free)
    if request.global_size not in (product, 0):
        large = find(degrees, request.global_size)
        if large is not None:
            yield Proposal(title=f"same degrees, {request.global_size} sequences", candidate=large)


def _seconds(candidate: Candidate) -> float:
    return candidate.predicted.step_seconds
