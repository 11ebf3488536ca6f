"""How often checkpoints are written, and the sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmtrain.events.schema import Payload
from llmtrain.events.words import IntervalSource
from llmtrain.units import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveIntervalSet(Payload):
    """Rank 0: how often checkpoints are written from now on."""

    kind: ClassVar[str] = "save_interval"
    every_steps: int | None = None
    """Steps between two checkpoints; None: steps do not count."""
    seconds: float = 0.0
    """Seconds between two checkpoints by the timer; 0: the timer is off."""
    source: IntervalSource = "fixed"
    stall_seconds: float = 0.0
    """Mean seconds that the training waits for a save; only where `source` is measured."""
    between_failures: float = 0.0
    """Mean seconds between two failures of the run; only where `source` is expected or measured."""


def interval_text(every_steps: int | None, seconds: float) -> str:
    """`every 50 steps and every 30 min`."""
    parts = [f"every {every_steps} steps"] if every_steps else []
    if seconds > 0.0:
        parts.append(f"every {format_duration(seconds)}")
    return " and ".join(parts) or "only at the end"


def source_text(source: IntervalSource, stall_seconds: float, between_failures: float) -> str:
    """Where an interval comes from; empty for a word of another version."""
    expected = f"failures every {format_duration(between_failures)}"
    texts: dict[IntervalSource, str] = {
        "fixed": "as the recipe says",
        "default": "the default",
        "expected": f"{expected}; no save measured yet",
        "measured": f"a save stalls {format_duration(stall_seconds)}, {expected}",
    }
    return texts.get(source, "")
