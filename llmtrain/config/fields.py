"""What a field may hold beyond its Python type: unit, bounds, pattern.

Attached with `Annotated`, read by `reading/schema.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

UnitKind = Literal["bytes", "bandwidth", "duration", "count", "flops"]


@dataclass(frozen=True, slots=True)
class Unit:
    """The field is written with a unit (`units.py`); a plain number is in the base unit."""

    kind: UnitKind


@dataclass(frozen=True, slots=True)
class Bounds:
    """Smallest and largest value; `open_*` leaves the end itself out."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies inside."""
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        below = self.high is None or (value < self.high if self.open_high else value <= self.high)
        return above and below


@dataclass(frozen=True, slots=True)
class Pattern:
    """The whole text must match `regex`; `words` says so to people."""

    regex: str
    words: str


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Text is taken as it is written: `OMP_NUM_THREADS: 1` is the text `1`."""


@dataclass(frozen=True, slots=True)
class RelativeTo:
    """A path; a relative one starts at the file that says it (or, from `--set`, at the working directory).

    The words in `keywords` are no paths and stay as they are.
    """

    keywords: tuple[str, ...] = ()


PositiveInt = Annotated[int, Bounds(low=1, high=2**53)]
"""A count of things."""
NaturalInt = Annotated[int, Bounds(low=0, high=2**53)]
"""A count that may be none."""
PositiveFloat = Annotated[float, Bounds(low=0, open_low=True)]
"""Larger than zero."""
NaturalFloat = Annotated[float, Bounds(low=0)]
"""Zero or larger."""
Fraction = Annotated[float, Bounds(low=0, high=1, open_high=True)]
"""A share that is not all: 0 <= x < 1."""
Share = Annotated[float, Bounds(low=0, high=1)]
"""A share, none and all included: 0 <= x <= 1."""
Count = Annotated[int, Unit("count"), Bounds(low=1, high=2**63)]
"""A large count: `300B`, `1e6`."""
Duration = Annotated[float, Unit("duration"), Bounds(low=0)]
"""Seconds: `30m`, `24:00:00`."""
PositiveDuration = Annotated[float, Unit("duration"), Bounds(low=0, open_low=True)]
"""Seconds, more than none."""
Bytes = Annotated[float, Unit("bytes"), Bounds(low=1e6)]
"""Bytes: `80 GB`. Less than a megabyte is a forgotten unit."""
Bandwidth = Annotated[float, Unit("bandwidth"), Bounds(low=1e6)]
"""Bytes/s: `400 Gb/s`. Less than a megabyte per second is a forgotten unit."""
FlopRate = Annotated[float, Unit("flops"), Bounds(low=1e9)]
"""FLOP/s: `312 TFLOP/s`. Less than a gigaFLOP/s is a forgotten unit."""
Name = Annotated[
    str, Pattern(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?", "lower-case letters, digits, `-`, `_`, `.`")
]
"""Part of file names, host names and scheduler job names."""
