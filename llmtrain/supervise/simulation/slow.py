"""Slow nodes of a simulated run: since when, what waiting for them costs, and when a spare is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from llmtrain.backends.base import Node
from llmtrain.run.record import AttemptRecord
from llmtrain.supervise.attempts.slow_nodes import saves
from llmtrain.supervise.attempts.step_up import may_restart_for_gain
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.detection.stragglers import confirmed_after
from llmtrain.supervise.nodes.membership import reliable_first
from llmtrain.supervise.simulation.model import Durations

EXCESS = 0.05
"""A slow node's time for a step over that of the others, less one."""


class SlowTimes:
    """When nodes are slow, seconds of the simulated clock."""

    def __init__(self, *, replaces: bool, took: Durations, limits: Limits) -> None:
        """`replaces`: whether the recipe wants their places given to spares."""
        self._replaces, self._took, self._limits = replaces, took, limits
        self._times: dict[str, tuple[float, float]] = {}

    def begin(self, node: str, at: float) -> None:
        """A node is slow from a moment on, until a person has mended it."""
        self._times[node] = (at, at + self._took.mend)

    def ordered(self, nodes: Sequence[Node], at: float) -> tuple[Node, ...]:
        """Nodes in the order in which they are used."""
        return reliable_first(nodes, dict.fromkeys(self._now(at), "slow") if self._replaces else {})

    def left_at(
        self, at: float, spares: Sequence[str], attempts: Sequence[AttemptRecord], between: float
    ) -> float:
        """When the attempt is left for one without the node that is slow from a moment on; never: infinity.
        `between`: mean seconds between two failures."""
        leaves = at + confirmed_after(self._took.step)
        is_rested = may_restart_for_gain(attempts, leaves, self._limits.step_up_back_off)
        is_better = saves(EXCESS, between) > self._took.restart and set(spares) - set(self._now(leaves))
        return leaves if self._replaces and is_rested and is_better else math.inf

    def cost(self, nodes: Iterable[str], began: float, ended: float) -> float:
        """Seconds that an attempt on some nodes lost to the slowest of them: a step waits for one as long as
        for several that are equally slow."""
        slow, reached = 0.0, began
        for since, until in sorted(self._times[node] for node in nodes if node in self._times):
            slow += max(0.0, min(until, ended) - max(since, reached))
            reached = max(reached, until)
        return slow * EXCESS / (1.0 + EXCESS)

    def _now(self, at: float) -> list[str]:
        return [node for node, (since, until) in self._times.items() if since <= at < until]
