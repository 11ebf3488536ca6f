"""What a simulated run came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from llmtrain.units import DAY


@dataclass(slots=True)
class Account:
    """Seconds by what they were spent on, and what was decided."""

    parts: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    incidents: Counter[str] = field(default_factory=Counter)
    detected: dict[str, list[float]] = field(default_factory=dict)
    """Kind -> seconds until each was found."""
    recovered: list[float] = field(default_factory=list)
    """Seconds from each failure to the first new step."""
    wrong: Counter[str] = field(default_factory=Counter)
    """Decisions that hindsight calls wrong, by kind."""
    most_lost: int = 0
    losable: int = 0
    intervals: list[float] = field(default_factory=list)

    def spend(self, part: str, seconds: float) -> None:
        """Note seconds."""
        self.parts[part] += seconds  # type: ignore[assignment]

    @property
    def total(self) -> float:
        """All seconds."""
        return float(sum(self.parts.values()))

    @property
    def goodput(self) -> float:
        """Share of the time that moved training forward at the planned speed."""
        return float(self.parts["productive"] / self.total) if self.total else 0.0

    def document(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "goodput": self.goodput,
            "days": self.total / DAY,
            "seconds": {name: float(seconds) for name, seconds in sorted(self.parts.items())},
            "incidents": dict(sorted(self.incidents.items())),
            "attempts": self.attempts,
            "decisions": dict(sorted(self.decisions.items())),
            "detection_seconds": {
                kind: {"median": median(found), "max": max(found)} for kind, found in self.detected.items()
            },
            "recovery_seconds": {
                "median": median(self.recovered) if self.recovered else None,
                "max": max(self.recovered, default=None),
            },
            "checkpoint_interval_seconds": median(self.intervals) if self.intervals else None,
            "budget": {"losable_nodes": self.losable, "most_lost": self.most_lost},
            "wrong_decisions": dict(sorted(self.wrong.items())),
        }
