"""`record.json`: what outlives the supervisor. Attempts, lost nodes, and how the run ended.

Written by the holder of the lease only; everything else about a run is folded from its events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from llmtrain.config.codec import to_json
from llmtrain.events.words import AttemptOutcome
from llmtrain.run.atomic import write_json
from llmtrain.run.job_file import read_document
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import Lease

RunStage = Literal["created", "running", "ended"]
Outcome = Literal["running", AttemptOutcome, "abandoned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of ranks, as the policy looks back on it."""

    number: int
    started: float
    """Epoch seconds."""
    ended: float | None = None
    outcome: Outcome = "running"
    """`abandoned`: its supervisor died; the next one found it so."""
    cause: str = ""
    """The kind of finding that ended it (`rank_dead`, `hang`, ...); empty when it ended by itself."""
    error: str = ""
    """The finding's message."""
    reached_step: int = 0
    """Highest step that finished in it."""
    committed_step: int = 0
    """Newest checkpoint committed in it; 0 for none."""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A node that was lost: how often, and whether it is left out now."""

    node: str
    since: float
    """Epoch seconds of its last loss."""
    times: int = 1
    """Losses over the whole run."""
    why: str = ""
    """The finding of its last loss."""
    is_away: bool = True
    """Whether it is in quarantine; a node that was taken up again is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """State of a run over all its supervisors."""

    schema: int = 1
    run_id: str
    stage: RunStage = "created"
    created: float
    """Epoch seconds."""
    attempts: tuple[AttemptRecord, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    """Distinct nodes lost so far; the node-loss budget counts these, also when they have come back."""
    nodes: tuple[str, ...] = ()
    """Nodes at launch, and those that joined at a later start; the budget is a share of them."""
    losses: tuple[NodeLoss, ...] = ()
    """History of every node that was ever lost."""
    allocation: str = ""
    """The scheduler's job that these nodes belonged to, where there is one."""
    exit_status: int | None = None
    """Exit code of the run's last ending; None while it runs or before."""
    message: str = ""
    """One sentence about the last ending."""
    stop_requested: bool = False
    """Whether a person asked for that ending: then no scheduler is to start the run again by itself."""

    @property
    def away(self) -> tuple[str, ...]:
        """Nodes in quarantine."""
        return tuple(loss.node for loss in self.losses if loss.is_away)

    @property
    def reached_step(self) -> int:
        """Highest step that any attempt finished."""
        return max((attempt.reached_step for attempt in self.attempts), default=0)

    @property
    def committed_step(self) -> int:
        """Newest checkpoint that any attempt committed; 0 for none."""
        return max((attempt.committed_step for attempt in self.attempts), default=0)

    def with_attempt(self, attempt: AttemptRecord) -> RunRecord:
        """The record with an attempt added, or replaced where its number is known."""
        others = tuple(known for known in self.attempts if known.number != attempt.number)
        ordered = tuple(sorted((*others, attempt), key=lambda each: each.number))
        return replace(self, attempts=ordered)


def read_record(run: RunDir) -> RunRecord:
    """Read `record.json`; raises RunError when it is missing or damaged."""
    return read_document(run.record_json, RunRecord)


def write_record(run: RunDir, record: RunRecord, lease: Lease | None = None) -> None:
    """Replace `record.json`; with a lease, raises LeaseLostError when another supervisor took over.

    Only `launch`, which creates the run directory, writes without a lease.
    """
    if lease is not None:
        lease.check()
    write_json(run.record_json, to_json(record))
