"""`apply`, the only reducer: every view, the watcher and the metrics see this one fold of the events.

`apply` is pure, never raises on a decoded event, and holds bounded memory. Events of different files may
come in any order (each file in its own): step, attempts, ranks, checkpoints and curves come out the same.
Each family of events has a module in `folds`, with a table of one reducer a kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from llmtrain.events import schema
from llmtrain.events.event import Event
from llmtrain.events.folds import attempts, checkpoints, nodes, ranks, reactions, training
from llmtrain.events.folds.ranks import rank_changes, with_rank
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.moments import describe
from llmtrain.events.records import Moment
from llmtrain.events.run_state import RunState

__all__ = ["RunState", "apply", "fold"]

MOMENTS = 64


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
        changes["ranks"] = with_rank(state, event, event.rank, rank_changes(event))
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


def _with_moment(moments: tuple[Moment, ...], moment: Moment) -> tuple[Moment, ...]:
    if not moments or moments[-1].time <= moment.time:
        return (*moments, moment)[-MOMENTS:]
    return tuple(sorted((*moments, moment), key=lambda known: known.time))[-MOMENTS:]


def _events_dropped(state: RunState, event: Event, payload: schema.EventsDropped) -> RunState:
    return replace(state, events_dropped=state.events_dropped + payload.count)


_REDUCERS: dict[str, Reducer] = {
    **attempts.REDUCERS,
    **training.REDUCERS,
    **checkpoints.REDUCERS,
    **ranks.REDUCERS,
    **nodes.REDUCERS,
    **reactions.REDUCERS,
    schema.EventsDropped.kind: _events_dropped,
}
