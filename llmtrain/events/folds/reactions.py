"""Reactions to bad numbers: how often, and what holds now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmtrain.events import reactions
from llmtrain.events.event import Event
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.run_state import RunState

WIDE_LAYERS = 1024
"""Most layers in a wider format that are kept."""
SKIPPED_WINDOWS = 4096
"""Most windows of skipped samples that are kept: the newest."""


def _count(name: str) -> Reducer:
    def reduce(state: RunState, event: Event, payload: Any) -> RunState:
        before = state.reactions
        return replace(state, reactions=replace(before, **{name: getattr(before, name) + 1}))

    return reduce


def _samples_skipped(state: RunState, event: Event, payload: reactions.SamplesSkipped) -> RunState:
    before = state.reactions
    window = (payload.first_sample, payload.first_sample + max(0, payload.samples))
    windows = _merged((*before.skipped_windows, window))[-SKIPPED_WINDOWS:]
    return replace(state, reactions=replace(before, skipped=before.skipped + 1, skipped_windows=windows))


def _merged(windows: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Windows that meet, as one."""
    apart: list[tuple[int, int]] = []
    for first, stop in sorted(windows):
        if apart and first <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(apart[-1][1], stop))
        else:
            apart.append((first, stop))
    return tuple(apart)


def _loss_scaled(state: RunState, event: Event, payload: reactions.LossScaled) -> RunState:
    before, place = state.reactions, (event.attempt, payload.step)
    if before.scale_place > place:
        return state
    return replace(
        state,
        reactions=replace(before, scale=payload.scale, overflows=payload.overflows, scale_place=place),
    )


def _layer_changed(state: RunState, event: Event, payload: reactions.LayerPrecisionChanged) -> RunState:
    before, place = state.reactions, (event.attempt, payload.step)
    known = before.layers.get(payload.layer)
    if (known is not None and known[0] > place) or (known is None and len(before.layers) >= WIDE_LAYERS):
        return state
    precision = payload.precision if payload.wide else ""
    return replace(
        state, reactions=replace(before, layers={**before.layers, payload.layer: (place, precision)})
    )


REDUCERS: dict[str, Reducer] = {
    reactions.StepRecomputed.kind: _count("recomputed"),
    reactions.SamplesSkipped.kind: _samples_skipped,
    reactions.Rewound.kind: _count("rewound"),
    reactions.SpikeFound.kind: _count("spikes"),
    reactions.GradientAlarm.kind: _count("alarms"),
    reactions.CorruptionFound.kind: _count("corruptions"),
    reactions.FaultInjected.kind: _count("injected"),
    reactions.LossScaled.kind: _loss_scaled,
    reactions.LayerPrecisionChanged.kind: _layer_changed,
}
