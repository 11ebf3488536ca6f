"""When to end an attempt in order for a better one: nodes are back, or one stays slow."""

from __future__ import annotations

from llmtrain.events.state import RunState
from llmtrain.events.words import GainCause
from llmtrain.run.record import RunRecord
from llmtrain.supervise.attempts.slow_nodes import SlowNodes, slow_nodes_of
from llmtrain.supervise.attempts.step_up import REPLACED, STEPPED_UP, StepUp, watch_for_nodes
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.detection.stragglers import Straggler
from llmtrain.supervise.nodes.members import Members
from llmtrain.supervise.session import Session


class GainWatch:
    """Looks for a better attempt beside the one that trains."""

    def __init__(self, step_up: StepUp | None, slow_nodes: SlowNodes) -> None:
        """`step_up`: None where the attempt already runs on the highest rung."""
        self._step_up, self._slow_nodes = step_up, slow_nodes
        self.gain = ""
        """What another attempt would gain, in words; empty: nothing is known."""
        self.cause: GainCause = STEPPED_UP
        """The attempt's cause of end, should it be left for that."""

    def look(self, state: RunState) -> str:
        """What is to be gained by ending the attempt now; empty: nothing, or a better moment will come."""
        if not self.gain and self._step_up is not None:
            self.gain = self._step_up.due(state)
        return self.gain

    def hear_of(self, slow: Straggler, node: str) -> None:
        """Take in that a rank on a node is slow."""
        if gain := self._slow_nodes.take(node, slow):
            self.gain, self.cause = gain, REPLACED


def gain_watch(session: Session, members: Members, record: RunRecord, plan: AttemptPlan) -> GainWatch:
    """The watch for one attempt; `record` is the run's at its start."""
    return GainWatch(
        watch_for_nodes(session, members, record, plan),
        slow_nodes_of(session, members, record.attempts, plan),
    )
