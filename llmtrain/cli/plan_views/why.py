"""Why a plan is as it is: the step as a sum, the runner-up, the refused, failures, how far to trust it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cli.console import columns, paint
from llmtrain.cli.plan_views.summary import choice_text, fastest, fitted, layout_words, wrapped
from llmtrain.units import DAY, format_bytes, format_duration, percent

if TYPE_CHECKING:
    from llmtrain.plan.plan import Candidate, Plan


def why_text(plan: Plan, plain: Candidate | None) -> str:
    """All explanations of a plan; `plain`: the same degrees without the planner's settings."""
    best = plan.plans[0]
    blocks = [_sum(best), _trust(best)]
    if len(plan.plans) > 1:
        blocks.append(comparison_text(best, plan.plans[1], ("plan 1", "plan 2")))
    if choice := _choice(plan):
        blocks.append(choice)
    if plain is not None:
        blocks.append(plain_text(plain, best))
    if len(plan.front) > 1:
        blocks.append(_front(plan.front))
    if plan.refused:
        blocks.append(_refused(plan))
    return "\n\n".join(blocks)


def _sum(candidate: Candidate) -> str:
    from llmtrain.plan.compare import exposed_parts, hidden_parts

    total = candidate.predicted.step_seconds
    rows = [
        (words, f"{seconds:.4g}", percent(seconds / total))
        for words, seconds in exposed_parts(candidate.parts)
    ]
    rows.append(("step", f"{total:.4g}", "100.0 %"))
    head = paint("The step of plan 1 as a sum", "bold")
    text = f"{head}\n{columns(('PART', 'SECONDS', 'SHARE'), rows, right=(1, 2))}"
    hidden = hidden_parts(candidate.parts)
    if hidden:
        words = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in hidden)
        text += f"\nHidden behind compute, not in the sum: {words}."
    if candidate.wire_bytes:
        words = ", ".join(f"{axis} {format_bytes(sent)}" for axis, sent in candidate.wire_bytes.items())
        text += f"\nThe first rank sends in a step: {words}."
    return text


def _trust(candidate: Candidate) -> str:
    predicted = candidate.predicted
    low = format_duration(predicted.step_seconds * (1 - predicted.error))
    high = format_duration(predicted.step_seconds * (1 + predicted.error))
    return (
        f"{paint('Trust', 'bold')}: nine times out of ten the step takes {low} to {high} "
        f"(+-{100 * predicted.error:.0f} %); `llmtrain profiles calibrate` narrows that."
    )


def _choice(plan: Plan) -> str:
    """The rule that put a slower layout first, and what it found; empty when plan 1 is the fastest."""
    from llmtrain.plan.layouts.points import complexity

    faster = fastest(plan)
    if faster is None:
        return ""
    one, two = complexity(plan.plans[0].layout), complexity(faster.layout)
    memory = f"{_memory(plan.plans[0])} against {_memory(faster)} a GPU"
    found = (
        f"Axes and settings in use: {one} against {two}."
        if one < two
        else f"Both use {one} axes and settings, so memory decides: {memory}."
    )
    return f"{paint('Choice', 'bold')}: {choice_text(plan)} {found}"


def comparison_text(first: Candidate, second: Candidate, names: tuple[str, str]) -> str:
    """Two candidates: settings that differ, figures, and the parts of the step that make the difference."""
    from llmtrain.plan.compare import changed_settings, differences

    one, two = names
    settings = [(name, str(a), str(b), "") for name, a, b in changed_settings(first.layout, second.layout)]
    figures = [
        ("step", _seconds(first), _seconds(second), _change(_step(second) - _step(first))),
        ("MFU", percent(first.predicted.mfu), percent(second.predicted.mfu), ""),
        ("memory/GPU", _memory(first), _memory(second), ""),
    ]
    parts = [
        (f"  {d.part}", f"{d.first:.4g} s", f"{d.second:.4g} s", _change(d.change))
        for d in differences(first, second)
        if abs(d.change) > 1e-4 * _step(first)
    ]
    head = paint(f"{one} against {two}", "bold")
    table = columns(("", one.upper(), two.upper(), "CHANGE"), [*settings, *figures, *parts], right=(1, 2, 3))
    return f"{head}\n{table}"


def plain_text(plain: Candidate, chosen: Candidate) -> str:
    """Before and after: plain settings at the same degrees against the chosen plan."""
    rows = []
    ranks = chosen.layout.world_size
    for words, candidate in (("plain settings", plain), ("chosen plan", chosen)):
        predicted = candidate.predicted
        memory = predicted.memory
        fits = "" if memory.total <= memory.capacity else " (does not fit)"
        rows.append(
            (
                words,
                layout_words(candidate.layout),
                format_bytes(memory.total * ranks) + fits,
                percent(predicted.mfu),
                percent(predicted.communication_ratio),
                _seconds(candidate),
                f"{_step(plain) / _step(candidate):.2f} x",
            )
        )
    header = ("", "LAYOUT", "MEMORY, ALL RANKS", "MFU", "COMMUNICATION", "STEP", "SPEED-UP")
    return f"{paint('Before and after', 'bold')}\n{columns(header, rows, right=(2, 3, 4, 5, 6))}"


def _front(front: tuple[Candidate, ...]) -> str:
    rows = [(layout_words(c.layout), str(c.layout.micro_batch), _seconds(c), _memory(c)) for c in front[:12]]
    head = paint("Speed against memory: nothing is both faster and smaller", "bold")
    return f"{head}\n{columns(('LAYOUT', 'MICRO', 'STEP', 'MEMORY/GPU'), rows, right=(1, 2, 3))}"


def _refused(plan: Plan) -> str:
    total = sum(group.count for group in plan.refused)
    rows = [(f"{group.count:,}", group.rule, group.example) for group in plan.refused]
    head = paint(f"Refused: {total:,} of {plan.evaluated:,} layouts", "bold")
    return f"{head}\n{columns(('LAYOUTS', 'RULE', 'E.G.'), rows, right=(0,))}"


def reliability_text(plan: Plan) -> str:
    """Failures, checkpoints, spares and the end of the training."""
    told = plan.reliability
    price = "" if told.price is None else f" Price: {told.price:,.0f}."
    text = wrapped(
        f"Failures: one every {format_duration(told.mtbf_seconds)}, "
        f"{told.failures:.1f} in all; spare nodes that cover them: {told.spares}. Save every "
        f"{format_duration(told.checkpoint_interval)} ({format_bytes(told.checkpoint_bytes)} in "
        f"{format_duration(told.checkpoint_seconds)}). "
        f"Goodput {percent(told.goodput)}: {format_duration(told.days * DAY)} to the end. Copies of the "
        f"states take {format_bytes(told.host_bytes_per_node)} of host memory a node; {told.survives}.{price}"
    )
    return text.replace("Failures", paint("Failures", "bold"), 1)


def lost_work_text(plan: Plan) -> str:
    """What failures cost, and what it takes of a node's memory that they cost no more."""
    told = plan.reliability
    text = wrapped(
        f"Failures: {told.survives}. Copies of the states take {format_bytes(told.host_bytes_per_node)} "
        "of host memory a node."
    )
    return text.replace("Failures", paint("Failures", "bold"), 1)


def proposals_text(plan: Plan) -> str:
    """What comes nearest to the recipe's request."""
    rows = []
    for proposal in plan.proposals:
        candidate = proposal.candidate
        predicted = candidate.predicted
        rows.append(
            (
                proposal.title,
                layout_words(candidate.layout),
                f"{candidate.layout.micro_batch} x {candidate.accumulation}",
                _seconds(candidate),
                f"{percent(predicted.mfu)} +-{100 * predicted.error * predicted.mfu:.0f}",
                percent(predicted.bubble_ratio),
                _memory(candidate),
            )
        )
    header = ("", "LAYOUT", "MICRO", "STEP", "MFU", "BUBBLE", "MEMORY/GPU")
    head = paint("Nearest to the request that work", "bold")
    return f"{head}\n{fitted(header, rows, (2, 3, 4, 5, 6))}"


def _step(candidate: Candidate) -> float:
    return candidate.predicted.step_seconds


def _seconds(candidate: Candidate) -> str:
    return format_duration(candidate.predicted.step_seconds)


def _memory(candidate: Candidate) -> str:
    return format_bytes(candidate.predicted.memory.total)


def _change(seconds: float) -> str:
    return f"{seconds:+.4g} s"
