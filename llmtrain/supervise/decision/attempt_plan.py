"""What an attempt is to run, and how it went."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.backends.base import Node
from llmtrain.config.layout import Layout
from llmtrain.supervise.decision.policy import AttemptEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """What an attempt runs."""

    number: int
    layout: Layout
    nodes: tuple[Node, ...]
    ranks_on_node: tuple[int, ...]
    rung: int = 0
    """Nodes that the rung of the ladder is made for; 0: the planned layout."""
    idle: tuple[str, ...] = ()
    """Names of nodes that are left and not used."""
    membership: str = ""
    """Why it runs on other nodes or in another layout than planned."""

    def has_ranks_of(self, other: AttemptPlan) -> bool:
        """Whether another attempt's ranks, once started, are just those of this one."""
        mine = (self.number, self.layout, self.nodes, self.ranks_on_node)
        return mine == (other.number, other.layout, other.nodes, other.ranks_on_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """How an attempt went."""

    end: AttemptEnd
    reached_step: int
    committed_step: int
    unreachable: tuple[str, ...] = ()
    """Nodes whose agent did not come up."""
