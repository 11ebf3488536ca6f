"""Line charts in text: braille dots where the terminal takes them, else ASCII."""

from __future__ import annotations

import math
from collections.abc import Sequence

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot at (row, column) inside one braille character of 4 x 2 dots."""
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BLOCKS = "_.-=+*#@"


def sparkline(values: Sequence[float], width: int, *, unicode: bool = True) -> str:
    """One line of at most `width` characters; an empty text when no value is finite."""
    columns = resample(values, width)
    known = [value for value in columns if value is not None]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    ramp = BLOCKS if unicode else ASCII_BLOCKS
    top = len(ramp) - 1
    return "".join(" " if value is None else ramp[round((value - low) / span * top)] for value in columns)


def line_chart(values: Sequence[float], width: int, height: int, *, unicode: bool = True) -> list[str]:
    """`height` lines of `width` characters, first value on the left, the largest on top; [] without values.

    The scale is labelled on the left with the largest and the smallest value; few values are joined by lines.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known or height < 1:
        return []
    low, high = min(known), max(known)
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"][-height:]
    gutter = max(len(label) for label in labels) + 1
    across, down = (2, 4) if unicode else (1, 1)
    columns = stretch(values, max(1, width - gutter) * across)
    rows = [[0] * -(-len(columns) // across) for _ in range(height)]
    span, bottom = (high - low) or 1.0, height * down - 1
    # A mean of equal values may lie a rounding error outside of them, which is much beside a span of 1.
    shares = [None if value is None else min(1.0, max(0.0, (high - value) / span)) for value in columns]
    dots = [None if share is None else round(share * bottom) for share in shares]
    for column, dot in enumerate(dots):
        for filled in _joined(dots[column - 1] if column else None, dot):
            mark = DOTS[filled % down][column % across] if unicode else 1
            rows[filled // down][column // across] |= mark
    return [
        label.rjust(gutter - 1) + " " + "".join(_cell(cell, unicode) for cell in row).rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]


def stretch(values: Sequence[float], width: int) -> list[float | None]:
    """Exactly `width` columns: means of equal parts, or straight lines between values when they are fewer."""
    if len(values) >= width or len(values) < 2 or not all(math.isfinite(value) for value in values):
        return resample(values, width)
    last = len(values) - 1
    places = (column * last / (width - 1) for column in range(width))
    return [_between(values, place) for place in places]


def _between(values: Sequence[float], place: float) -> float:
    index = min(int(place), len(values) - 2)
    return values[index] + (values[index + 1] - values[index]) * (place - index)


def _joined(before: int | None, dot: int | None) -> range:
    """Dots of one column: its own, and those that lead to it from the column before."""
    if dot is None:
        return range(0)
    if before is None or before == dot:
        return range(dot, dot + 1)
    return range(before + 1, dot + 1) if before < dot else range(dot, before)


def resample(values: Sequence[float], width: int) -> list[float | None]:
    """Means of `width` equal parts (all values when they are fewer); None where no value is finite."""
    count = min(width, len(values))
    parts = (values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count))
    return [_mean(part) for part in parts]


def _mean(part: Sequence[float]) -> float | None:
    known = [value for value in part if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _cell(bits: int, unicode: bool) -> str:
    if unicode:
        return chr(BRAILLE + bits) if bits else " "
    return "*" if bits else " "
