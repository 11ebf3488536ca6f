"""The one place that knows the parallel axes: names, order, degrees, rank <-> coordinate, groups.

Standard library only, so that the planner on a login node and the engine in a rank share the object.
Axes from slowest to fastest: pp, dp, cp, tp. `tp` is on neighbouring ranks (inside a node). `ep` is a
regrouping of dp x cp x tp and never a factor of the world size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

AXES: tuple[str, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's position on every axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The degree of every axis; raises ValueError when one is not a positive integer."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in (*AXES, "ep"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"degree of {name} must be a positive integer, not {degree!r}")
        if (self.dp * self.cp * self.tp) % self.ep:
            raise ValueError(f"ep={self.ep} must divide dp x cp x tp = {self.dp * self.cp * self.tp}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def degree(self, axis: str) -> int:
        """Degree of one of AXES."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}[axis]

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on an axis."""
        position = AXES.index(axis)
        return prod(self.degree(faster) for faster in AXES[position + 1 :])

    def coordinate(self, rank: int) -> Coordinate:
        """Position of a rank; raises ValueError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        return Coordinate(**{axis: rank // self.stride(axis) % self.degree(axis) for axis in AXES})

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Rank at a position."""
        position = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        for axis, index in position.items():
            if not 0 <= index < self.degree(axis):
                raise ValueError(f"{axis}={index} is outside 0..{self.degree(axis) - 1}")
        return sum(position[axis] * self.stride(axis) for axis in AXES)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """All groups of ranks that differ on the given axes only, each in rank order."""
        fixed = [axis for axis in AXES if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinate(rank)
            members.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(rank)
        yield from (tuple(ranks) for ranks in members.values())

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group, along the given axes, that a rank belongs to."""
        place = self.coordinate(rank)
        return tuple(
            other
            for other in range(self.world_size)
            if all(
                getattr(self.coordinate(other), axis) == getattr(place, axis)
                for axis in AXES
                if axis not in axes
            )
        )
