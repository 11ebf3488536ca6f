"""Ranks of the newest attempt, and what was found to be wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmtrain.events import schema
from llmtrain.events.event import Event
from llmtrain.events.folds.attempts import with_attempt
from llmtrain.events.folds.nodes import MEMBERS
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.records import RANK_STATUS_ORDER, RankState, RankStatus
from llmtrain.events.run_state import RunState


def with_rank(state: RunState, event: Event, rank: int, changes: dict[str, Any]) -> Mapping[int, RankState]:
    """The ranks after `changes` to one of them; those of another attempt stay as they are."""
    if event.attempt != state.attempt or (rank not in state.ranks and len(state.ranks) >= MEMBERS):
        return state.ranks
    before = state.ranks.get(rank) or RankState(rank=rank, attempt=event.attempt)
    status = max(before.status, changes.pop("status", RankStatus.RUNNING), key=RANK_STATUS_ORDER.index)
    seen = max(before.last_seen, event.time) if event.source == "rank" else before.last_seen
    return {**state.ranks, rank: replace(before, status=status, last_seen=seen, **changes)}


def rank_changes(event: Event) -> dict[str, Any]:
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


def _found(state: RunState, event: Event, payload: schema.Found) -> RunState:
    state = with_attempt(
        state,
        event.attempt,
        lambda attempt: replace(
            attempt,
            finding=attempt.finding or payload.finding,
            found_time=event.time if attempt.found_time is None else attempt.found_time,
        ),
    )
    if payload.rank is None or payload.finding != "rank_dead":
        return state
    before = state.ranks.get(payload.rank)
    changes: dict[str, Any] = {"status": RankStatus.DEAD}
    if before is None or not before.error:
        changes["error"] = payload.message
    return replace(state, ranks=with_rank(state, event, payload.rank, changes))


REDUCERS: dict[str, Reducer] = {schema.Found.kind: _found}
