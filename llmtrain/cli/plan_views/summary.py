"""A plan as a person reads it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from llmtrain.cli.console import columns, paint
from llmtrain.units import DAY, format_bytes, format_count, format_duration, percent, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.config.job import JobSpec
    from llmtrain.config.layout import Layout
    from llmtrain.plan.plan import Candidate, Plan, Rung

WIDTH = 80
"""Columns that every terminal has."""
_HEADER = ("", "LAYOUT", "MICRO", "STEP", "TOKENS/S/GPU", "MFU", "BUBBLE", "COMM.", "MEMORY/GPU")
_RIGHT = (2, 3, 4, 5, 6, 7, 8)


def plan_text(spec: JobSpec, plan: Plan, nodes: int) -> str:
    """Plans, the best one in detail, and the ladder."""
    table = "\n".join(filter(None, (_plans(plan), wrapped(choice_text(plan)))))
    blocks = [_title(spec, plan, nodes), table, _best(spec, plan.plans[0])]
    if len(plan.ladder) > 1:
        blocks.append(_ladder(plan))
    from llmtrain.cli.plan_views.why import proposals_text, reliability_text

    if spec.cluster.nodes > 1:
        blocks.append(reliability_text(plan))
    if plan.proposals:
        blocks.append(proposals_text(plan))
    return "\n\n".join(blocks)


def choice_text(plan: Plan) -> str:
    """Why plan 1 is not the fastest, with both steps and the rule; empty when it is the fastest."""
    from llmtrain.plan.layouts.points import TIE

    faster = fastest(plan)
    if faster is None:
        return ""
    other = "plan 2" if faster in plan.plans else layout_words(faster.layout)
    one, two = (candidate.predicted.step_seconds for candidate in (plan.plans[0], faster))
    return (
        f"Plan 1 is {percent(one / two - 1)} slower than {other} ({one:.4g} s against {two:.4g} s): within "
        f"{100 * TIE:.0f} % of the fastest the simplest layout wins, then the one with least memory."
    )


def fastest(plan: Plan) -> Candidate | None:
    """The fastest layout found where plan 1 is slower by an amount that shows."""
    first = plan.plans[0]
    best = min((*plan.front[:1], *plan.plans[1:2]), key=lambda c: c.predicted.step_seconds, default=first)
    return best if first.predicted.step_seconds / best.predicted.step_seconds >= 1.0005 else None


def layout_words(layout: Layout) -> str:
    """`dp8 tp8 pp4 vpp2 zero1 sp full`: the axes, and the knobs that are on."""
    degrees = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "vpp", "cp", "ep")}
    words = [
        f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1 or axis in {"dp", "tp", "pp"}
    ]
    words.append(f"zero{layout.zero}")
    if layout.sequence_parallel:
        words.append("sp")
    if layout.schedule == "zero-bubble":
        words.append("zero-bubble")
    if layout.recompute != "none":
        words.append(f"recompute-{layout.recompute}")
    return " ".join(words)


def _title(spec: JobSpec, plan: Plan, nodes: int) -> str:
    recipe, cluster = spec.recipe, spec.cluster
    gpus = nodes * cluster.gpus_per_node
    tokens = recipe.batch.global_size * recipe.model.sequence
    accelerator = cluster.accelerator if isinstance(cluster.accelerator, str) else cluster.accelerator.name
    model = f"{format_count(plan.model.parameters)} parameters, {format_count(tokens)} tokens a step,"
    used = max(candidate.layout.world_size for candidate in plan.plans)
    where = f"{gpus} x {accelerator} ({plural(nodes, 'node')}){f', {used} used' if used < gpus else ''}"
    length = len(f"{recipe.name} on {cluster.name}: {model} {where}")
    head = f"{paint(recipe.name, 'bold')} on {paint(cluster.name, 'bold')}: {model}"
    return f"{head}{' ' if length <= WIDTH else chr(10)}{where}"


def _plans(plan: Plan) -> str:
    rows = [(str(number), *_cells(candidate)) for number, candidate in enumerate(plan.plans, start=1)]
    return fitted(_HEADER, rows, _RIGHT)


def fitted(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """A table whose second column, the layout, has a line of its own where all would be wider than WIDTH."""
    whole = columns(header, rows, right=right)
    if max(len(line) for line in columns(header, rows, right=right, bold=False).splitlines()) <= WIDTH:
        return whole
    numbers = columns(header[2:], [row[2:] for row in rows], right=[column - 2 for column in right])
    names = [f"{row[0]}  {row[1]}" for row in rows]
    names.insert(0, paint(f"{header[0] or ' '}  {header[1]}", "bold"))
    pairs = zip(names, numbers.splitlines(), strict=True)
    return "\n".join(f"{name}\n   {line}" for name, line in pairs)


def wrapped(text: str) -> str:
    """Plain text in lines of at most WIDTH."""
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _cells(candidate: Candidate) -> tuple[str, ...]:
    predicted = candidate.predicted
    memory = predicted.memory
    return (
        layout_words(candidate.layout),
        f"{candidate.layout.micro_batch} x {candidate.accumulation}",
        format_duration(predicted.step_seconds),
        f"{predicted.tokens_per_second_per_gpu:,.0f}",
        percent(predicted.mfu),
        percent(predicted.bubble_ratio),
        percent(predicted.exposed_communication_ratio),
        f"{format_bytes(memory.total)} of {format_bytes(memory.capacity)}",
    )


def _best(spec: JobSpec, best: Candidate) -> str:
    memory, predicted = best.predicted.memory, best.predicted
    kinds = ("parameters", "gradients", "optimizer", "activations", "workspace")
    parts = ", ".join(f"{kind} {format_bytes(getattr(memory, kind))}" for kind in kinds)
    steps = spec.recipe.train.steps or 0
    length = format_duration(predicted.train_days * DAY)
    return (
        f"Plan 1: {format_count(steps)} steps take about {length}, {predicted.gpu_hours:,.1f} GPU hours.\n"
        + wrapped(f"Fullest rank: {parts}.")
    )


def _ladder(plan: Plan) -> str:
    """One row for every stretch of node counts with the same layout."""
    rows: list[tuple[str, ...]] = []
    for stretch in _stretches(plan.ladder):
        first, last = stretch[0], stretch[-1]
        nodes = str(first.nodes) if first is last else f"{first.nodes} to {last.nodes}"
        if first.candidate is None:
            rows.append((nodes, "nothing fits", "", "", "", ""))
            continue
        idle = str(first.idle_nodes) if first is last else f"{first.idle_nodes} to {last.idle_nodes}"
        counts = sorted(set(first.micro_batches), reverse=True)
        rows.append(
            (
                nodes,
                layout_words(first.candidate.layout),
                f"{first.candidate.layout.micro_batch} x {' or '.join(map(str, counts))}",
                format_duration(first.candidate.predicted.step_seconds),
                percent(first.candidate.predicted.mfu),
                idle,
            )
        )
    header = ("NODES LEFT", "LAYOUT", "MICRO", "STEP", "MFU", "IDLE NODES")
    return fitted(header, rows, (2, 3, 4, 5))


def _stretches(ladder: tuple[Rung, ...]) -> list[list[Rung]]:
    stretches: list[list[Rung]] = []
    for rung in ladder:
        if stretches and stretches[-1][-1].candidate == rung.candidate:
            stretches[-1].append(rung)
        else:
            stretches.append([rung])
    return stretches
