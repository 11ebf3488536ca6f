"""What `status --json` prints: one object, schema 1, keys that other tools may rely on."""

from __future__ import annotations

import math
from typing import Any

from llmtrain.events.records import AttemptState, CheckpointPoint, RankState, SaveInterval
from llmtrain.observe.goodput import costs, costs_by_cause, goodput
from llmtrain.observe.members import node_states
from llmtrain.observe.reactions import reactions_document
from llmtrain.observe.run_reader import RunView

CURVE_LIMIT = 200
"""Most points of the loss curve in the document."""


def status_document(view: RunView) -> dict[str, Any]:
    """The state of one run. Numbers that are unknown or not finite are null; times are epoch seconds."""
    state, ended = view.state, view.state.ended
    return {
        "schema": 1,
        "run": view.run.run_id,
        "path": str(view.run.path),
        "state": view.status,
        "recipe": view.job.recipe,
        "cluster": view.job.cluster,
        "backend": view.job.backend,
        **_progress(view),
        "layout": dict(view.layout),
        "attempt": state.attempt,
        "restarts": state.restarts,
        "supervised": view.is_supervised,
        "exit_status": ended.exit_status if ended else None,
        "message": ended.message if ended else None,
        "ranks": [_rank(view, state.ranks[rank]) for rank in sorted(state.ranks)],
        "nodes": _nodes(view),
        "members": _members(view),
        "lost_nodes": list(view.job.lost_nodes),
        "attempts": _attempts(view),
        "checkpoint": _checkpoint(view, state.checkpoints[-1]) if state.checkpoints else None,
        "checkpoint_interval": _save_interval(state.save_interval),
        "goodput": {**goodput(view).document(), "cost_seconds_by_cause": costs_by_cause(view)},
        "loss_curve": _curve(view),
        "events": [
            {"time": moment.time, "attempt": moment.attempt, "level": moment.level, "text": moment.text}
            for moment in state.moments
        ],
        "reactions": reactions_document(state.reactions),
        "events_dropped": state.events_dropped,
        "complete": view.complete,
        "time": view.now,
    }


def _progress(view: RunView) -> dict[str, Any]:
    """How far the training is, how well it learns, and how fast."""
    state, latest, validation = view.state, view.state.latest, view.state.evaluations.last
    return {
        "step": state.step,
        "steps": state.total_steps,
        "loss": number(latest.loss) if latest else None,
        "validation_loss": number(validation.loss) if validation else None,
        "validation_step": validation.step if validation else None,
        "learning_rate": number(latest.learning_rate) if latest else None,
        "grad_norm": number(latest.grad_norm) if latest else None,
        "tokens_per_second": number(state.tokens_per_second),
        "seconds_per_step": number(state.seconds_per_step),
        "planned_seconds_per_step": number(view.job.planned_step_seconds),
        "mfu": number(latest.mfu) if latest else None,
        "eta_seconds": number(state.eta_seconds),
    }


def runs_document(views: list[RunView], unreadable: list[str]) -> dict[str, Any]:
    """The runs of a folder, newest first."""
    return {
        "schema": 1,
        "runs": [
            {
                "run": view.run.run_id,
                "path": str(view.run.path),
                "state": view.status,
                "recipe": view.job.recipe,
                "cluster": view.job.cluster,
                "step": view.state.step,
                "steps": view.state.total_steps,
                "loss": number(view.state.latest.loss) if view.state.latest else None,
                "restarts": view.state.restarts,
                "last_event": number(view.state.last_event),
                "exit_status": view.state.ended.exit_status if view.state.ended else None,
            }
            for view in views
        ],
        "unreadable": unreadable,
    }


def number(value: float | None) -> float | None:
    """The number, or None when JSON cannot hold it."""
    return value if value is not None and math.isfinite(value) else None


def _rank(view: RunView, rank: RankState) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "state": str(rank.status),
        "alive": view.state.is_alive(rank.rank) and view.is_supervised,
        "phase": rank.phase,
        "step": rank.step,
        "last_seen": rank.last_seen,
        "seconds_since_seen": number(max(0.0, view.now - rank.last_seen)),
        "host": rank.host,
        "pid": rank.pid,
        "local_rank": rank.local_rank,
        "memory_bytes": rank.memory_bytes,
        "step_seconds": number(rank.step_seconds),
        "compute_seconds": number(rank.compute_seconds),
        "error": rank.error,
    }


def _save_interval(interval: SaveInterval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {
        "steps": interval.every_steps,
        "seconds": number(interval.seconds),
        "source": interval.source,
        "stall_seconds": number(interval.stall_seconds),
        "between_failures_seconds": number(interval.between_failures),
    }


def _nodes(view: RunView) -> list[dict[str, Any]]:
    return [
        {
            "node": sample.node,
            "host": sample.host,
            "time": sample.time,
            "cpu_percent": number(sample.cpu_percent),
            "memory_used": sample.memory_used,
            "memory_total": sample.memory_total,
            "ranks_alive": list(sample.ranks_alive),
        }
        for sample in (view.state.nodes[node] for node in sorted(view.state.nodes))
    ]


def _members(view: RunView) -> list[dict[str, Any]]:
    known = view.state.members
    return [
        {
            "node": name,
            "state": str(status),
            "since": known[name].since if name in known else None,
            "until": known[name].until if name in known else None,
            "reason": known[name].reason if name in known else "",
        }
        for name, status in node_states(view).items()
    ]


def _attempts(view: RunView) -> list[dict[str, Any]]:
    prices = {cost.attempt: cost.total for cost in costs(view)}
    return [_attempt(attempt, prices.get(attempt.number)) for attempt in view.state.attempts]


def _attempt(attempt: AttemptState, cost: float | None) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "started": attempt.started,
        "ended": attempt.ended,
        "seconds": number(attempt.seconds),
        "reason": attempt.reason,
        "outcome": attempt.outcome or None,
        "cause": attempt.cause,
        "finding": attempt.finding or None,
        "cost_seconds": number(cost),
        "nodes": list(attempt.nodes),
        "world_size": attempt.world_size,
        "layout": attempt.layout,
        "rung": attempt.rung or None,
        "idle": list(attempt.idle),
        "membership": attempt.membership,
        "restored_step": attempt.restored_step,
        "restored_checkpoint": attempt.restored_checkpoint,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "steps": attempt.steps,
    }


def _checkpoint(view: RunView, point: CheckpointPoint) -> dict[str, Any]:
    return {
        "name": point.name,
        "step": point.step,
        "time": point.time,
        "age_seconds": number(max(0.0, view.now - point.time)),
        "bytes": point.bytes,
        "seconds": number(point.seconds),
    }


def _curve(view: RunView) -> dict[str, list[Any]]:
    points = view.state.history.points
    stride = max(1, -(-len(points) // CURVE_LIMIT))
    kept = points[::stride]
    return {"step": [point.step for point in kept], "loss": [number(point.loss) for point in kept]}
