"""Two layouts compared, and a request of plain settings against the chosen plan: pure values for tables."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmtrain.config.layout import Layout
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.plan import Breakdown, Candidate


@dataclass(frozen=True, slots=True)
class Difference:
    """One part of a step in two plans."""

    part: str
    first: float
    second: float

    @property
    def change(self) -> float:
        """Seconds that the second takes more."""
        return self.second - self.first


STEP_PARTS: tuple[tuple[str, str], ...] = (
    ("forward", "forward kernels"),
    ("backward", "backward kernels"),
    ("recompute", "recomputation"),
    ("head", "embedding, head and loss"),
    ("tensor", "tensor-parallel traffic"),
    ("context", "context-parallel traffic"),
    ("expert", "expert-parallel traffic"),
    ("pipeline", "stage-to-stage traffic"),
    ("bubble", "pipeline bubble"),
    ("data", "gradients and weights"),
    ("optimizer", "optimizer"),
    ("overhead", "other"),
)
"""Names of the parts that add up to a step, and how people call them."""
HIDDEN_PARTS: tuple[tuple[str, str], ...] = (
    ("tensor_hidden", "tensor-parallel traffic"),
    ("context_hidden", "context-parallel traffic"),
    ("pipeline_hidden", "stage-to-stage traffic"),
    ("data_hidden", "gradients and weights"),
)
"""Traffic that runs beside compute."""


def differences(first: Candidate, second: Candidate) -> list[Difference]:
    """Parts of the step that differ, largest change first; they add up to the difference of the steps."""
    found = [
        Difference(words, getattr(first.parts, name), getattr(second.parts, name))
        for name, words in STEP_PARTS
    ]
    return sorted((d for d in found if d.change), key=lambda d: -abs(d.change))


def changed_settings(first: Layout, second: Layout) -> list[tuple[str, object, object]]:
    """Fields in which two layouts differ: name, first, second."""
    pairs = ((f.name, getattr(first, f.name), getattr(second, f.name)) for f in fields(Layout))
    return [(name, one, other) for name, one, other in pairs if one != other]


def plain_settings(evaluator: Evaluator, chosen: Candidate) -> Candidate:
    """The chosen degrees with plain settings: 1F1B, no ZeRO, no sequence parallelism, everything recomputed.

    What a launch script without a planner would start from: the reference that a plan's gain is told against.
    """
    layout = chosen.layout
    plain = Layout(
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        zero=0,
        micro_batch=layout.micro_batch,
        recompute="full",
    )
    return evaluator.candidate(plain)


def exposed_parts(parts: Breakdown) -> list[tuple[str, float]]:
    """The step as a sum: words and seconds, zero parts left out."""
    return [(words, getattr(parts, name)) for name, words in STEP_PARTS if getattr(parts, name) > 0.0]


def hidden_parts(parts: Breakdown) -> list[tuple[str, float]]:
    """Traffic that costs nothing because it runs beside compute."""
    return [(words, getattr(parts, name)) for name, words in HIDDEN_PARTS if getattr(parts, name) > 0.0]
