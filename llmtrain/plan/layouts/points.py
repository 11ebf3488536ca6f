"""Which of the layouts that fit is the choice, and which are on the front of speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.config.layout import Layout

TIE = 0.02
"""Plans whose steps differ by less than this share are equal: two similar plans are compared better than
one is known.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One fitting layout: what it costs."""

    seconds: float
    layout: Layout
    micro_batches: int
    least: float
    """Bytes that its fullest rank needs at least."""


def choose(points: Sequence[Point], memory: Callable[[Point], float]) -> Point | None:
    """The simplest of the layouts within the model's error of the fastest (points sorted by time)."""
    if not points:
        return None
    limit = points[0].seconds * (1.0 + TIE)
    ties = [point for point in points if point.seconds <= limit]
    simplest = min(complexity(point.layout) for point in ties)
    ties = [point for point in ties if complexity(point.layout) == simplest]
    return min(ties, key=lambda point: (memory(point), point.seconds))


def pareto(points: Sequence[Point], memory: Callable[[Point], float]) -> list[Point]:
    """Points that no other beats in both time and memory; points sorted by time."""
    front: list[Point] = []
    least = float("inf")
    for point in points:
        if point.least < 0.99 * least and (need := memory(point)) < 0.99 * least:
            front.append(point)
            least = need
    return front


def complexity(layout: Layout) -> int:
    """Parts of a layout that can go wrong: axes in use, and settings beyond the plainest."""
    axes = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep))
    settings = (layout.vpp > 1) + (layout.zero > 1) + layout.sequence_parallel
    settings += {"none": 0, "selective": 1, "full": 2}[layout.recompute]
    return axes + settings + (layout.schedule == "zero-bubble")
