"""What the supervisor says of nodes and ranks that it watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmtrain.events.schema import Payload
from llmtrain.events.words import NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged(Payload):
    """Supervisor: a node is in another state than before. `attempt_started` makes its nodes healthy and its
    idle ones spare without this."""

    kind: ClassVar[str] = "node_changed"
    node: str
    """Its name."""
    state: NodeStatus
    reason: str = ""
    until: float | None = None
    """End of a quarantine, epoch seconds; then the node is looked at again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank(Payload):
    """Supervisor: a rank computes longer than the ranks that do the same work."""

    kind: ClassVar[str] = "slow_rank"
    rank: int
    node: str
    excess: float
    """0.05: it takes 5 % longer."""
    step: int
    peers: int
    """Ranks that it was compared with."""
    confirmed: bool = False
    """Whether it was slow for minutes, and not for some steps."""
