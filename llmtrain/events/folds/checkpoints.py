"""Checkpoints: those that count, and the time that saving took."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.events import schema
from llmtrain.events.event import Event
from llmtrain.events.folds.attempts import counting, with_attempt
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.records import CheckpointPoint
from llmtrain.events.run_state import RunState

CHECKPOINTS = 16


def _checkpoint_committed(state: RunState, event: Event, payload: schema.CheckpointCommitted) -> RunState:
    state = with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(attempt, checkpoint_seconds=attempt.checkpoint_seconds + payload.seconds),
    )
    point = CheckpointPoint(
        step=payload.step,
        attempt=event.attempt,
        name=payload.name,
        time=event.time,
        bytes=payload.bytes,
        seconds=payload.seconds,
    )
    by_step = {old.step: old for old in sorted((*state.checkpoints, point), key=lambda old: old.attempt)}
    ordered = tuple(by_step[step] for step in sorted(by_step))
    return replace(state, checkpoints=counting(state, ordered)[-CHECKPOINTS:])


REDUCERS: dict[str, Reducer] = {schema.CheckpointCommitted.kind: _checkpoint_committed}
