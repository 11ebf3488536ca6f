"""A curve over steps in bounded memory: full detail while it is short, evenly thinned out when it is long."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

CURVE_POINTS = 1024


class Point(Protocol):
    """Something measured at a step of an attempt."""

    @property
    def step(self) -> int:
        """Optimizer step, from 1."""
        ...

    @property
    def attempt(self) -> int:
        """Attempt that measured it."""
        ...


P = TypeVar("P", bound=Point)


@dataclass(frozen=True, slots=True)
class Curve(Generic[P]):
    """Points in order of step, at most one a step and at most `limit`; the order of adding does not matter.

    A point stays when it is the first of its `stride` steps; the stride doubles whenever there are too many
    points. A step that is measured again keeps the newer attempt's point.
    """

    points: tuple[P, ...] = ()
    stride: int = 1
    limit: int = field(default=CURVE_POINTS, kw_only=True)

    @property
    def last(self) -> P | None:
        """The point of the highest step."""
        return self.points[-1] if self.points else None

    def add(self, point: P) -> Curve[P]:
        """The curve with one more point."""
        points, place = self.points, len(self.points)
        if points and points[-1].step >= point.step:
            place = bisect_left(points, point.step, key=attrgetter("step"))
        bucket = (point.step - 1) // self.stride
        if place and (points[place - 1].step - 1) // self.stride == bucket:
            return self
        takes_place = place < len(points) and (points[place].step - 1) // self.stride == bucket
        if takes_place and points[place].step == point.step and points[place].attempt > point.attempt:
            return self
        joined = (*points[:place], point, *points[place + takes_place :])
        return Curve(*_thinned(joined, self.stride, self.limit), limit=self.limit)

    def rewound(self, attempt: int, step: int) -> Curve[P]:
        """The curve after an attempt started again from `step`: older attempts' points beyond it did not
        count."""
        if not self.points or self.points[-1].step <= step:
            return self
        kept = tuple(point for point in self.points if point.step <= step or point.attempt >= attempt)
        return Curve(kept, self.stride, limit=self.limit)


def _thinned(points: tuple[P, ...], stride: int, limit: int) -> tuple[tuple[P, ...], int]:
    """The points with a stride at which they are few enough: the first of every `stride` steps each."""
    while len(points) > limit:
        stride *= 2
        first: dict[int, P] = {}
        for point in points:
            first.setdefault((point.step - 1) // stride, point)
        points = tuple(first.values())
    return points, stride
