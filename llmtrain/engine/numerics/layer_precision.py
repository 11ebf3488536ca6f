"""Which layers run in a wider format than the rest. Pure; decided between steps, the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from llmtrain.config.numerics import LayerPrecisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """What is known against a layer."""

    strikes: int = 0
    """Alarms, none more than `hold_steps` after the one before."""
    last_alarm: int = 0
    """Step of the last one."""
    wide: bool = False
    """Whether it runs in the fallback format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """A layer changes its format from the next step on."""

    layer: str
    wide: bool
    reason: str


def observe(
    records: Mapping[str, LayerRecord], config: LayerPrecisionConfig, step: int, alarmed: Collection[str]
) -> tuple[dict[str, LayerRecord], tuple[LayerChange, ...]]:
    """Records after a step in which the given layers raised alarms, and what changes with the next step."""
    if not config.adaptive or not (records or alarmed):
        return dict(records), ()
    after: dict[str, LayerRecord] = {}
    changes: list[LayerChange] = []
    for layer in sorted({*records, *alarmed}):
        record = records.get(layer, LayerRecord())
        quiet = step - record.last_alarm
        if layer in alarmed:
            strikes = record.strikes + 1 if record.strikes and quiet <= config.hold_steps else 1
            wide = record.wide or strikes >= config.strikes
            if wide and not record.wide:
                changes.append(LayerChange(layer=layer, wide=True, reason=f"{strikes} alarms"))
            after[layer] = LayerRecord(strikes=strikes, last_alarm=step, wide=wide)
        elif quiet < config.hold_steps:
            after[layer] = record
        elif record.wide:  # A layer that has been quiet for so long is forgotten.
            changes.append(LayerChange(layer=layer, wide=False, reason=f"{quiet} steps without an alarm"))
    return after, tuple(changes)


def wide_layers(records: Mapping[str, LayerRecord]) -> tuple[str, ...]:
    """Layers that run in the fallback format."""
    return tuple(sorted(layer for layer, record in records.items() if record.wide))
