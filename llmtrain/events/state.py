"""`apply`, the only reducer: every view, the watcher and the metrics see this one fold of the events.

`apply` is pure, never raises on a decoded event, and holds bounded memory. Events of different files may
come in any order (each file in its own): step, attempts, ranks, checkpoints and curves come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from llmtrain.events import schema
from llmtrain.events.curve import Point
from llmtrain.events.event import Event
from llmtrain.events.moments import describe
from llmtrain.events.records import (
    RANK_STATUS_ORDER,
    AttemptState,
    CheckpointPoint,
    Ending,
    EvaluationPoint,
    Moment,
    NodeState,
    RankState,
    RankStatus,
    StepPoint,
)
from llmtrain.events.run_state import RunState

__all__ = ["RunState", "apply", "fold"]

RECENT_STEPS = 32
MOMENTS = 64
CHECKPOINTS = 16
ATTEMPTS = 256
MEMBERS = 16384
"""Most ranks, and most nodes, that are kept."""

P = TypeVar("P", bound=Point)


def apply(state: RunState, event: Event) -> RunState:
    """The state after one more event."""
    changes: dict[str, Any] = {"last_event": event.time}
    if state.last_event is not None and state.last_event > event.time:
        changes["last_event"] = state.last_event
    if not state.run:
        changes["run"] = event.run
    if event.attempt > state.attempt:
        state = replace(state, attempt=event.attempt, ranks={}, nodes={})
    if event.rank is not None and event.source == "rank":
        changes["ranks"] = _with_rank(state, event, event.rank, _rank_changes(event))
    state = replace(state, **changes)
    reducer = _REDUCERS.get(event.kind)
    if reducer is not None:
        state = reducer(state, event, event.payload)
    moment = describe(event)
    return state if moment is None else replace(state, moments=_with_moment(state.moments, moment))


def fold(events: Iterable[Event], state: RunState | None = None) -> RunState:
    """The state after all the events, from `state` on."""
    state = state or RunState()
    for event in events:
        state = apply(state, event)
    return state


# ---- members of the newest attempt
# --------------------------------------------------------------------------
def _with_rank(state: RunState, event: Event, rank: int, changes: dict[str, Any]) -> Mapping[int, RankState]:
    if event.attempt != state.attempt or (rank not in state.ranks and len(state.ranks) >= MEMBERS):
        return state.ranks
    before = state.ranks.get(rank) or RankState(rank=rank, attempt=event.attempt)
    status = max(before.status, changes.pop("status", RankStatus.RUNNING), key=RANK_STATUS_ORDER.index)
    seen = max(before.last_seen, event.time) if event.source == "rank" else before.last_seen
    return {**state.ranks, rank: replace(before, status=status, last_seen=seen, **changes)}


def _rank_changes(event: Event) -> dict[str, Any]:
    """What an event of a rank says about that rank."""
    changes: dict[str, Any] = {}
    match event.payload:
        case schema.RankStarted(host=host, pid=pid, local_rank=local_rank):
            changes = {"status": RankStatus.STARTING, "host": host, "pid": pid, "local_rank": local_rank}
        case schema.PhaseStarted(phase=phase, step=step):
            changes = {"phase": phase, "phase_time": event.time} | ({"step": step} if step else {})
        case schema.RankStep() as own:
            changes = {
                "step": own.step,
                "memory_bytes": own.memory_bytes,
                "step_seconds": own.seconds,
                "compute_seconds": own.compute_seconds,
            }
        case schema.StepFinished(step=step) | schema.Restored(step=step):
            changes = {"step": step}
        case schema.RankFailed(error=error):
            changes = {"status": RankStatus.FAILED, "error": error}
        case schema.RankFinished(step=step):
            changes = {"status": RankStatus.FINISHED, "step": step}
    return changes


# ---- attempts, and what a newer attempt took back
# -----------------------------------------------------------
def _with_attempt(state: RunState, number: int, change: Callable[[AttemptState], AttemptState]) -> RunState:
    attempts = {attempt.number: attempt for attempt in state.attempts}
    attempts[number] = change(attempts.get(number) or AttemptState(number=number))
    return replace(state, attempts=tuple(attempts[key] for key in sorted(attempts))[-ATTEMPTS:])


def _is_superseded(state: RunState, attempt: int, step: int) -> bool:
    """Whether a newer attempt started again before this step, so that it does not count any more."""
    return any(
        later.number > attempt and later.restored_step is not None and later.restored_step < step
        for later in reversed(state.attempts)
    )


def _counting(state: RunState, points: tuple[P, ...]) -> tuple[P, ...]:
    return tuple(point for point in points if not _is_superseded(state, point.attempt, point.step))


def _with_moment(moments: tuple[Moment, ...], moment: Moment) -> tuple[Moment, ...]:
    if not moments or moments[-1].time <= moment.time:
        return (*moments, moment)[-MOMENTS:]
    return tuple(sorted((*moments, moment), key=lambda known: known.time))[-MOMENTS:]


# ---- one reducer a kind
# -------------------------------------------------------------------------------------
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
    state = _with_attempt(state, event.attempt, lambda attempt: _attempt_with_step(attempt, point))
    if _is_superseded(state, point.attempt, point.step):
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
    )


def _restored(state: RunState, event: Event, payload: schema.Restored) -> RunState:
    state = _with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(attempt, restored_step=payload.step, restored_checkpoint=payload.checkpoint),
    )
    return replace(
        state,
        history=state.history.rewound(event.attempt, payload.step),
        evaluations=state.evaluations.rewound(event.attempt, payload.step),
        recent=_counting(state, state.recent),
        checkpoints=_counting(state, state.checkpoints),
    )


def _evaluated(state: RunState, event: Event, payload: schema.Evaluated) -> RunState:
    state = _with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(attempt, evaluation_seconds=attempt.evaluation_seconds + payload.seconds),
    )
    if _is_superseded(state, event.attempt, payload.step):
        return state
    point = EvaluationPoint(step=payload.step, attempt=event.attempt, loss=payload.loss)
    return replace(state, evaluations=state.evaluations.add(point))


def _checkpoint_committed(state: RunState, event: Event, payload: schema.CheckpointCommitted) -> RunState:
    state = _with_attempt(
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
    return replace(state, checkpoints=_counting(state, ordered)[-CHECKPOINTS:])


def _attempt_started(state: RunState, event: Event, payload: schema.AttemptStarted) -> RunState:
    return _with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(
            attempt,
            started=event.time,
            reason=payload.reason,
            nodes=payload.nodes,
            world_size=payload.world_size,
            layout=payload.layout,
            rung=payload.rung,
            idle=payload.idle,
            membership=payload.membership,
        ),
    )


def _attempt_ended(state: RunState, event: Event, payload: schema.AttemptEnded) -> RunState:
    return _with_attempt(
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


def _found(state: RunState, event: Event, payload: schema.Found) -> RunState:
    if payload.rank is None or payload.finding != "rank_dead":
        return state
    before = state.ranks.get(payload.rank)
    changes: dict[str, Any] = {"status": RankStatus.DEAD}
    if before is None or not before.error:
        changes["error"] = payload.message
    return replace(state, ranks=_with_rank(state, event, payload.rank, changes))


def _node_sample(state: RunState, event: Event, payload: schema.NodeSample) -> RunState:
    if event.attempt != state.attempt or (payload.node not in state.nodes and len(state.nodes) >= MEMBERS):
        return state
    sample = NodeState(
        node=payload.node,
        attempt=event.attempt,
        host=payload.host,
        time=event.time,
        cpu_percent=payload.cpu_percent,
        memory_used=payload.memory_used,
        memory_total=payload.memory_total,
        ranks_alive=payload.ranks_alive,
    )
    return replace(state, nodes={**state.nodes, payload.node: sample})


def _events_dropped(state: RunState, event: Event, payload: schema.EventsDropped) -> RunState:
    return replace(state, events_dropped=state.events_dropped + payload.count)


def _run_ended(state: RunState, event: Event, payload: schema.RunEnded) -> RunState:
    before = state.ending
    if before is not None and (before.attempt, before.time) > (event.attempt, event.time):
        return state
    ending = Ending(
        attempt=event.attempt, time=event.time, exit_status=payload.exit_status, message=payload.message
    )
    return replace(state, ending=ending)


_REDUCERS: dict[str, Callable[[RunState, Event, Any], RunState]] = {
    schema.StepFinished.kind: _step_finished,
    schema.Restored.kind: _restored,
    schema.Evaluated.kind: _evaluated,
    schema.CheckpointCommitted.kind: _checkpoint_committed,
    schema.AttemptStarted.kind: _attempt_started,
    schema.AttemptEnded.kind: _attempt_ended,
    schema.Found.kind: _found,
    schema.NodeSample.kind: _node_sample,
    schema.EventsDropped.kind: _events_dropped,
    schema.RunEnded.kind: _run_ended,
}
