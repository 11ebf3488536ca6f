"""What follows when a node stays slow: where the recipe says so, another node takes its place.

A slow node is not a lost one: it costs nothing of the node-loss budget, and stays as the last spare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llmtrain.run.record import AttemptRecord
from llmtrain.supervise.attempts.step_up import may_restart_for_gain
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.decision.failure_rate import expected_between
from llmtrain.supervise.detection.stragglers import Straggler
from llmtrain.supervise.nodes.members import Members
from llmtrain.supervise.session import Session


def saves(excess: float, between: float) -> float:
    """Seconds that a run without the slow rank is ahead after the mean time `between` two failures: all ranks
    of a step wait for the slowest."""
    return between * excess / (1.0 + excess)


class SlowNodes:
    """The slow nodes of one attempt. `convict` has them used last from now on."""

    def __init__(
        self,
        *,
        replaces: bool,
        spares: Sequence[str],
        pays: Callable[[float], bool],
        convict: Callable[[str, str], None],
    ) -> None:
        """`spares`: idle nodes that nothing is known against; `pays`: whether a rank's excess is worth a
        restart now."""
        self._replaces, self._spares, self._pays, self._convict = replaces, spares, pays, convict
        self._convicted: set[str] = set()

    def take(self, node: str, slow: Straggler) -> str:
        """A rank of a node is slow; what ending the attempt now would gain, empty: nothing."""
        if not self._replaces or not slow.is_confirmed or node in self._convicted:
            return ""
        why = f"its rank {slow.rank} computed {slow.excess:.1%} longer than its peers"
        self._convicted.add(node)
        self._convict(node, why)
        good = [name for name in self._spares if name not in self._convicted]
        if not good or not self._pays(slow.excess):
            return ""
        return f"{node} is slow: {why}; {good[0]} takes its place"


def slow_nodes_of(
    session: Session, members: Members, attempts: Sequence[AttemptRecord], plan: AttemptPlan
) -> SlowNodes:
    """The watch over slow nodes for an attempt."""
    failures = session.job.spec.cluster.failures
    between = expected_between(attempts, failures.node_mtbf, len(plan.nodes))

    def pays(excess: float) -> bool:
        is_rested = may_restart_for_gain(attempts, time.time(), session.limits.step_up_back_off)
        return is_rested and saves(excess, between) > failures.restart

    return SlowNodes(
        replaces=session.job.spec.recipe.faults.slow_ranks == "replace",
        spares=[name for name in plan.idle if name not in members.suspects],
        pays=pays,
        convict=members.convict,
    )
