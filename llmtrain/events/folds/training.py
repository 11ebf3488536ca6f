"""Training: steps, validations and their curves."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.events import schema
from llmtrain.events.event import Event
from llmtrain.events.folds.attempts import is_superseded, with_attempt
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.records import AttemptState, EvaluationPoint, StepPoint
from llmtrain.events.run_state import RunState

RECENT_STEPS = 32


def _step_finished(state: RunState, event: Event, payload: schema.StepFinished) -> RunState:
    point = StepPoint(
        step=payload.step,
        attempt=event.attempt,
        time=event.time,
        loss=payload.loss,
        grad_norm=payload.grad_norm,
        learning_rate=payload.learning_rate,
        seconds=payload.seconds,
        tokens=payload.tokens,
        tokens_per_second=payload.tokens_per_second,
        mfu=payload.mfu,
    )
    state = with_attempt(state, event.attempt, lambda attempt: _attempt_with_step(attempt, point))
    if is_superseded(state, point.attempt, point.step):
        return state
    return replace(state, history=state.history.add(point), recent=_with_recent(state.recent, point))


def _with_recent(recent: tuple[StepPoint, ...], point: StepPoint) -> tuple[StepPoint, ...]:
    if not recent or (recent[-1].attempt == point.attempt and recent[-1].step < point.step):
        return (*recent, point)[-RECENT_STEPS:]
    newest = max(recent[-1].attempt, point.attempt)
    by_step = {old.step: old for old in (*recent, point) if old.attempt == newest}
    return tuple(by_step[step] for step in sorted(by_step))[-RECENT_STEPS:]


def _attempt_with_step(attempt: AttemptState, point: StepPoint) -> AttemptState:
    first = attempt.first_step is None or point.step < attempt.first_step
    last = attempt.last_step is None or point.step > attempt.last_step
    return replace(
        attempt,
        first_step=point.step if first else attempt.first_step,
        first_step_time=point.time if first else attempt.first_step_time,
        last_step=point.step if last else attempt.last_step,
        last_step_time=point.time if last else attempt.last_step_time,
        steps_seen=attempt.steps_seen + 1,
        step_seconds=attempt.step_seconds + point.seconds,
        tokens_seen=attempt.tokens_seen + point.tokens,
    )


def _evaluated(state: RunState, event: Event, payload: schema.Evaluated) -> RunState:
    state = with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(attempt, evaluation_seconds=attempt.evaluation_seconds + payload.seconds),
    )
    if is_superseded(state, event.attempt, payload.step):
        return state
    point = EvaluationPoint(step=payload.step, attempt=event.attempt, loss=payload.loss)
    return replace(state, evaluations=state.evaluations.add(point))


REDUCERS: dict[str, Reducer] = {
    schema.StepFinished.kind: _step_finished,
    schema.Evaluated.kind: _evaluated,
}
