"""Numbers and states as the words that every view uses; `-` for what is not known."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from llmtrain.units import format_bytes, format_count, format_duration

UNKNOWN = "-"

STYLES = {
    "running": "green",
    "finished": "bold green",
    "alive": "green",
    "completed": "green",
    "stopped": "yellow",
    "starting": "cyan",
    "preparing": "cyan",
    "created": "cyan",
    "restarting": "yellow",
    "interrupted": "bold yellow",
    "warning": "yellow",
    "slow": "yellow",
    "waiting": "cyan",
    "abandoned": "yellow",
    "unknown": "yellow",
    "failed": "bold red",
    "dead": "bold red",
    "lost": "bold red",
    "healthy": "green",
    "quarantined": "yellow",
    "spare": "cyan",
    "error": "bold red",
}
"""Colour of a word; it never carries meaning alone, the word does."""


SPENT = {
    "productive": "training",
    "slow": "slower on fewer nodes",
    "lost": "steps done again",
    "start": "starting",
    "load": "loading",
    "checkpoint": "saving",
    "evaluation": "validating",
    "detect": "noticing failures",
    "tear_down": "tearing down",
    "down": "between attempts",
}
"""What time was spent on, for people; a part that is not here has its own name."""


def loss_text(value: float | None) -> str:
    """`2.9312`, `nan`."""
    return UNKNOWN if value is None else f"{value:.4f}"


def small_text(value: float | None) -> str:
    """`2.90e-04`, `0.82`."""
    if value is None:
        return UNKNOWN
    return f"{value:.2e}" if value != 0 and abs(value) < 0.01 else f"{value:.4g}"


def count_text(value: float | None) -> str:
    """`12.3 k`."""
    return format_count(value) if value is not None and math.isfinite(value) else UNKNOWN


def bytes_text(value: float | None) -> str:
    """`1.1 GB`."""
    return format_bytes(value) if value is not None and math.isfinite(value) else UNKNOWN


def duration_text(seconds: float | None) -> str:
    """`2 min 05 s`."""
    return format_duration(seconds) if seconds is not None and math.isfinite(seconds) else UNKNOWN


def age_text(seconds: float | None) -> str:
    """`now`, `12 s ago`; clocks of other machines may run ahead."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return "now" if seconds < 1 else f"{format_duration(round(seconds))} ago"


def percent_text(ratio: float | None) -> str:
    """`42 %`; a ratio that is not quite 1 is never rounded up to 100 %."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    return "100 %" if ratio >= 1 else f"{min(99, round(100 * ratio))} %"


def layout_text(layout: Mapping[str, Any]) -> str:
    """`dp 2 x tp 2 x pp 2, zero 1, micro-batch 4, 1f1b`: the degrees above 1, then the rest."""
    axes = [f"{axis} {layout[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if _degree(layout, axis) > 1]
    parts = [" x ".join(axes) or "one rank"] if layout else []
    if _degree(layout, "vpp") > 1:
        parts.append(f"vpp {layout['vpp']}")
    if "zero" in layout:
        parts.append(f"zero {layout['zero']}")
    if layout.get("sequence_parallel"):
        parts.append("sequence parallel")
    if "micro_batch" in layout:
        parts.append(f"micro-batch {layout['micro_batch']}")
    if _degree(layout, "pp") > 1 and "schedule" in layout:
        parts.append(str(layout["schedule"]))
    if layout.get("recompute", "none") != "none":
        parts.append(f"{layout['recompute']} recompute")
    return ", ".join(parts) or UNKNOWN


def comparison_text(measured: float, planned: float) -> str:
    """`as planned`, `12 % more than planned`, `3.1 x the plan`: a number against what the plan said of it."""
    ratio = measured / planned
    if abs(ratio - 1) < 0.015:
        return "as planned"
    if ratio > 2:
        return f"{ratio:.2g} x the plan" if ratio < 1000 else "far above the plan"
    return f"{100 * abs(ratio - 1):.0f} % {'more' if ratio > 1 else 'less'} than planned"


def clock_text(moment: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _degree(layout: Mapping[str, Any], axis: str) -> int:
    value = layout.get(axis, 1)
    return value if isinstance(value, int) else 1
