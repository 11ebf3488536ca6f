"""Reactions to bad numbers, as a person and as a script see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmtrain.events.records import Reactions

MOST_LAYERS = 3


def reactions_document(reactions: Reactions) -> dict[str, Any]:
    """The part of `status --json` that tells of them."""
    return {
        "recomputed": reactions.recomputed,
        "skipped": reactions.skipped,
        "skipped_samples": reactions.skipped_samples,
        "rewound": reactions.rewound,
        "spikes": reactions.spikes,
        "alarms": reactions.alarms,
        "corruptions": reactions.corruptions,
        "injected": reactions.injected,
        "loss_scale": reactions.scale,
        "overflows": reactions.overflows,
        "wide_layers": reactions.wide_layers,
    }


def reactions_text(reactions: Reactions) -> str:
    """One line; empty while nothing has happened."""
    return "   ".join(_words(reactions))


def _count(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _words(reactions: Reactions) -> Iterator[str]:
    if reactions.injected:
        yield f"REHEARSAL: {_count(reactions.injected, 'fault')} injected"
    if reactions.recomputed:
        yield f"{_count(reactions.recomputed, 'step')} recomputed in FP32"
    if reactions.skipped_samples:
        yield f"{_count(reactions.skipped_samples, 'sample')} skipped"
    counts = {
        "rewind": reactions.rewound,
        "spike": reactions.spikes,
        "gradient alarm": reactions.alarms,
        "corruption": reactions.corruptions,
    }
    for name, count in counts.items():
        if count:
            yield _count(count, name)
    if reactions.scale is not None:
        yield f"loss scale {reactions.scale:g}"
    wide = reactions.wide_layers
    if wide:
        more = f" and {len(wide) - MOST_LAYERS} more" if len(wide) > MOST_LAYERS else ""
        named = (f"{layer} in {precision}" for layer, precision in list(wide.items())[:MOST_LAYERS])
        yield ", ".join(named) + more
