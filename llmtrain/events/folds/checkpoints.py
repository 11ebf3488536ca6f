"""Checkpoints: those that count, and the time that saving took."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.events import schema
from llmtrain.events.event import Event
from llmtrain.events.folds.attempts import counting, with_attempt
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.records import CheckpointPoint, SaveInterval
from llmtrain.events.run_state import RunState
from llmtrain.events.saving import SaveIntervalSet

CHECKPOINTS = 16


def _checkpoint_committed(state: RunState, event: Event, payload: schema.CheckpointCommitted) -> RunState:
    waited = payload.seconds if payload.stall_seconds is None else payload.stall_seconds
    state = _with_stall(state, event, waited)
    point = CheckpointPoint(
        step=payload.step,
        attempt=event.attempt,
        name=payload.name,
        time=event.time,
        bytes=payload.bytes,
        seconds=payload.seconds,
        stall_seconds=payload.stall_seconds,
    )
    by_step = {old.step: old for old in sorted((*state.checkpoints, point), key=lambda old: old.attempt)}
    ordered = tuple(by_step[step] for step in sorted(by_step))
    return replace(state, checkpoints=counting(state, ordered)[-CHECKPOINTS:])


def _snapshot_taken(state: RunState, event: Event, payload: schema.SnapshotTaken) -> RunState:
    return _with_stall(state, event, payload.stall_seconds)


def _interval_set(state: RunState, event: Event, payload: SaveIntervalSet) -> RunState:
    known = state.save_interval
    if known is not None and known.attempt > event.attempt:
        return state
    interval = SaveInterval(
        attempt=event.attempt,
        every_steps=payload.every_steps,
        seconds=payload.seconds,
        source=payload.source,
        stall_seconds=payload.stall_seconds,
        between_failures=payload.between_failures,
    )
    return replace(state, save_interval=interval)


def _with_stall(state: RunState, event: Event, seconds: float) -> RunState:
    return with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(attempt, checkpoint_seconds=attempt.checkpoint_seconds + seconds),
    )


REDUCERS: dict[str, Reducer] = {
    schema.CheckpointCommitted.kind: _checkpoint_committed,
    schema.SnapshotTaken.kind: _snapshot_taken,
    SaveIntervalSet.kind: _interval_set,
}
