"""Plots as inline SVG: no scripts, nothing to load. Colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from llmtrain.observe.html.page import PALETTE

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 30
TICKS = 5
COLOURS = len(PALETTE)
LARGEST = 1e30
"""Values beyond are drawn as gaps, like those that are not finite: they would flatten all others."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot; points that are not finite make gaps."""

    name: str
    points: Sequence[tuple[float, float]]


def line_plot(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    text: Callable[[float], str] = "{:.4g}".format,
) -> str:
    """A plot of lines over a common x axis, or a sentence when there is nothing to draw."""
    finite = [(x, y) for line in series for x, y in line.points if abs(y) < LARGEST]
    if not finite:
        return figure(title, '<p class="empty">no data</p>')
    across = Axis.of([x for x, _ in finite], LEFT, WIDTH - RIGHT)
    up = Axis.of([y for _, y in finite], HEIGHT - BOTTOM, TOP)
    parts = [_grid(across, up, text, x_name)]
    parts += [_line(line, index, across, up) for index, line in enumerate(series)]
    return figure(title, drawing(title, parts, HEIGHT) + _names([line.name for line in series]))


def bar_plot(title: str, bars: Sequence[tuple[str, float]], *, text: Callable[[float], str]) -> str:
    """Horizontal bars with their values; zero is on the left."""
    known = [(name, value) for name, value in bars if math.isfinite(value) and value >= 0]
    if not known:
        return figure(title, '<p class="empty">no data</p>')
    largest = max(value for _, value in known) or 1.0
    row, parts = 18, []
    for index, (name, value) in enumerate(known):
        y, length = TOP + index * row, (WIDTH - LEFT - 90) * value / largest
        parts.append(f'<text class="label" x="{LEFT - 6}" y="{y + 12}">{escape(name)}</text>')
        parts.append(f'<rect class="c0" x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{row - 5}"/>')
        parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}">{escape(text(value))}</text>')
    return figure(title, drawing(title, parts, TOP + row * len(known) + 6))


def share_bar(title: str, shares: Sequence[tuple[str, float]], *, text: Callable[[float], str]) -> str:
    """One bar cut into parts, with a legend that holds their values."""
    known = [(name, value) for name, value in shares if math.isfinite(value) and value > 0]
    total = sum(value for _, value in known)
    if not total:
        return figure(title, '<p class="empty">no data</p>')
    parts, x = [], 0.0
    for index, (_, value) in enumerate(known):
        width = (WIDTH - 2) * value / total
        parts.append(
            f'<rect class="c{index % COLOURS}" x="{1 + x:.1f}" y="4" width="{width:.1f}" height="26"/>'
        )
        x += width
    names = [f"{name} {text(value)} ({100 * value / total:.0f} %)" for name, value in known]
    return figure(title, drawing(title, parts, 34) + _names(names))


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a span reads well, and its seconds."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 4 * 3600 else ("hours", 3600.0)


def figure(title: str, body: str) -> str:
    """A titled block of the page."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{body}</figure>"


def drawing(title: str, parts: Iterable[str], height: float, *, width: float = WIDTH) -> str:
    """The picture that holds some shapes, in pixels; the page scales it to its column."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(parts)}</svg>"


def legend(entries: Iterable[tuple[int, str]], *, after: str = "") -> str:
    """What the colours of a picture mean: (number of the colour, word)."""
    items = (
        f'<li><span class="key b{colour % COLOURS}"></span>{escape(word)}</li>' for colour, word in entries
    )
    return f'<ul class="legend">{"".join(items)}{after}</ul>'


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values to pixels."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> Axis:
        """The scale that holds all values; a single value is in its middle."""
        low, high = min(values), max(values)
        if low == high:
            margin = abs(low) / 10 or 1.0
            low, high = low - margin, high + margin
        return cls(low, high, begin, end)

    def place(self, value: float) -> float:
        """Pixel of a value."""
        return self.begin + (self.end - self.begin) * ((value - self.low) / (self.high - self.low))

    def ticks(self) -> list[float]:
        """Round values on the axis, 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 and math.isfinite(rough) else 1.0
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(self.low / step)
        return [tick * step for tick in range(first, first + 2 * TICKS + 2) if tick * step <= self.high]


def _grid(across: Axis, up: Axis, text: Callable[[float], str], x_name: str) -> str:
    parts = []
    for value in up.ticks():
        y = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="label" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text(value))}</text>')
    for value in across.ticks():
        x = across.place(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}">{value:.6g}</text>')
    parts.append(f'<text class="tick" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 3}">{escape(x_name)}</text>')
    return "".join(parts)


def _line(series: Series, index: int, across: Axis, up: Axis) -> str:
    pieces: list[list[str]] = [[]]
    for x, y in series.points:
        if abs(y) < LARGEST:
            pieces[-1].append(f"{across.place(x):.1f},{up.place(y):.1f}")
        elif pieces[-1]:
            pieces.append([])
    drawn = []
    for piece in filter(None, pieces):
        if len(piece) == 1:
            x_text, _, y_text = piece[0].partition(",")
            drawn.append(f'<circle class="c{index % COLOURS}" cx="{x_text}" cy="{y_text}" r="2.5"/>')
        else:
            drawn.append(f'<polyline class="line s{index % COLOURS}" points="{" ".join(piece)}"/>')
    return "".join(drawn)


def _names(names: Sequence[str]) -> str:
    return legend(enumerate(names)) if len(names) > 1 else ""
