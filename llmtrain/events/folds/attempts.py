"""Attempts: how each one went, and what a newer one took back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from llmtrain.events import schema
from llmtrain.events.curve import Point
from llmtrain.events.event import Event
from llmtrain.events.folds.nodes import with_started_nodes
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.records import AttemptState, Ending
from llmtrain.events.run_state import RunState

ATTEMPTS = 256

P = TypeVar("P", bound=Point)


def with_attempt(state: RunState, number: int, change: Callable[[AttemptState], AttemptState]) -> RunState:
    """The state with one attempt changed, known so far or not."""
    attempts = {attempt.number: attempt for attempt in state.attempts}
    attempts[number] = change(attempts.get(number) or AttemptState(number=number))
    return replace(state, attempts=tuple(attempts[key] for key in sorted(attempts))[-ATTEMPTS:])


def is_superseded(state: RunState, attempt: int, step: int) -> bool:
    """Whether a newer attempt started again before this step, so that it does not count any more."""
    return any(
        later.number > attempt and later.restored_step is not None and later.restored_step < step
        for later in reversed(state.attempts)
    )


def counting(state: RunState, points: tuple[P, ...]) -> tuple[P, ...]:
    """The points that no newer attempt took back."""
    return tuple(point for point in points if not is_superseded(state, point.attempt, point.step))


def _attempt_started(state: RunState, event: Event, payload: schema.AttemptStarted) -> RunState:
    return with_attempt(
        with_started_nodes(state, event, payload),
        event.attempt,
        lambda attempt: replace(
            attempt,
            started=event.time,
            reason=payload.reason,
            nodes=payload.nodes,
            world_size=max(0, payload.world_size),
            layout=payload.layout,
            rung=payload.rung,
            idle=payload.idle,
            membership=payload.membership,
        ),
    )


def _restored(state: RunState, event: Event, payload: schema.Restored) -> RunState:
    state = with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(
            attempt,
            restored_step=payload.step,
            restored_checkpoint=payload.checkpoint,
            load_seconds=max(0.0, event.time - (attempt.load_began or event.time)),
        ),
    )
    return replace(
        state,
        history=state.history.rewound(event.attempt, payload.step),
        evaluations=state.evaluations.rewound(event.attempt, payload.step),
        recent=counting(state, state.recent),
        checkpoints=counting(state, state.checkpoints),
    )


def _phase_started(state: RunState, event: Event, payload: schema.PhaseStarted) -> RunState:
    if payload.phase != "load" or event.rank != 0:
        return state
    return with_attempt(state, event.attempt, lambda attempt: replace(attempt, load_began=event.time))


def _attempt_ended(state: RunState, event: Event, payload: schema.AttemptEnded) -> RunState:
    return with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(
            attempt,
            ended=event.time,
            outcome=payload.outcome or "ended",
            cause=payload.cause,
            seconds=payload.seconds,
        ),
    )


def _run_ended(state: RunState, event: Event, payload: schema.RunEnded) -> RunState:
    before = state.ending
    if before is not None and (before.attempt, before.time) > (event.attempt, event.time):
        return state
    ending = Ending(
        attempt=event.attempt, time=event.time, exit_status=payload.exit_status, message=payload.message
    )
    return replace(state, ending=ending)


REDUCERS: dict[str, Reducer] = {
    schema.AttemptStarted.kind: _attempt_started,
    schema.Restored.kind: _restored,
    schema.PhaseStarted.kind: _phase_started,
    schema.AttemptEnded.kind: _attempt_ended,
    schema.RunEnded.kind: _run_ended,
}
