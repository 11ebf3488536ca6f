"""How often a run fails, by its own record and its profile. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.plan.save_interval import between_failures
from llmtrain.run.record import AttemptRecord


def expected_between(attempts: Sequence[AttemptRecord], node_mtbf: float, nodes: int) -> float:
    """Mean seconds between two failures of an attempt on so many nodes, after these attempts.

    Attempts that trained count; one that failed before its first step says more about its start than about
    how long training lasts.
    """
    trained = [attempt for attempt in attempts if attempt.ended is not None and attempt.reached_step]
    failed = sum(attempt.outcome in ("failed", "abandoned") for attempt in trained)
    seconds = sum(max(0.0, (attempt.ended or 0.0) - attempt.started) for attempt in trained)
    return between_failures(node_mtbf, nodes, failed, seconds)
