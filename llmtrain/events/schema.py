"""The shared language of engine, watcher and views: one dataclass per kind of event.

One line of a JSONL file is one event: an envelope {v, time, run, attempt, source, rank, seq, kind, data}.
Readers skip kinds and fields that they do not know. `time` is epoch seconds. `step` counts optimizer steps
from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from llmtrain.events.words import (
    Action,
    AttemptOutcome,
    ErrorClass,
    FindingKind,
    LeavesAs,
    Level,
    Phase,
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Base of all payloads; `kind` is the word in the envelope."""

    kind: ClassVar[str] = ""


# ---- written by ranks
# ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted(Payload):
    """A rank's process runs (before torch is imported)."""

    kind: ClassVar[str] = "rank_started"
    host: str
    pid: int
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted(Payload):
    """A rank enters a phase; limits of the watcher are per phase."""

    kind: ClassVar[str] = "phase_started"
    phase: Phase
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Payload):
    """Rank 0: where the attempt starts from."""

    kind: ClassVar[str] = "restored"
    step: int
    """Last step contained in the state; 0 when fresh."""
    checkpoint: str | None
    """Name of the checkpoint, or None when the state comes from the seed."""
    reason: str = ""
    """Why it is not the newest one, or why it is fresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished(Payload):
    """Rank 0: one optimizer step, as all ranks agreed on it."""

    kind: ClassVar[str] = "step_finished"
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens: int
    tokens_per_second: float
    mfu: float | None = None
    first_sample: int = 0
    """Global index of the step's first sample; it consumed `samples` from there."""
    samples: int = 0
    data_digest: int | None = None
    """Of the samples as they were read by all ranks (`corpus/samples.py`); -1: ranks of one replica read
    different ones. None: not told."""
    data_seconds: float = 0.0
    """Seconds that rank 0 waited for its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep(Payload):
    """Every rank, every few steps: its own times, for stragglers and memory. Times are means."""

    kind: ClassVar[str] = "rank_step"
    step: int
    seconds: float
    compute_seconds: float
    """Seconds outside of collectives."""
    data_seconds: float = 0.0
    """Seconds of waiting for the batch."""
    memory_bytes: int
    """Peak device memory, or resident memory on a CPU."""
    core_wait_seconds: float = 0.0
    """Seconds in which it could have run but had no core (the run queue's wait, Linux only)."""
    steps: int = 1
    """Steps that the means cover; `step` is the last of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChanged(Payload):
    """Rank 0: all ranks go on with another micro-batch; the global batch stays."""

    kind: ClassVar[str] = "micro_batch_changed"
    step: int
    """First step with it."""
    micro_batch: int
    """Sequences of a forward pass."""
    before: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Payload):
    """Rank 0: validation loss after a step."""

    kind: ClassVar[str] = "evaluated"
    step: int
    loss: float
    seconds: float
    corpora: dict[str, float] = field(default_factory=dict)
    """Loss on each corpus of a blend; empty for one corpus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStarted(Payload):
    """Rank 0: a save begins."""

    kind: ClassVar[str] = "checkpoint_started"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Payload):
    """Rank 0: the checkpoint is durable and is now the newest one."""

    kind: ClassVar[str] = "checkpoint_committed"
    step: int
    name: str
    bytes: int
    seconds: float
    """Seconds from its beginning to the commit; most of them run beside the training."""
    stall_seconds: float | None = None
    """Seconds that the training waited for it; None: all of `seconds`."""
    is_full: bool = True
    """False: it holds only what has changed since the checkpoint before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Payload):
    """Rank 0: a checkpoint by the timer was left out, because the one before is still being written."""

    kind: ClassVar[str] = "checkpoint_skipped"
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken(Payload):
    """Rank 0: a snapshot is complete in the nodes' memory."""

    kind: ClassVar[str] = "snapshot_taken"
    step: int
    seconds: float
    """Seconds from its beginning to its completion."""
    stall_seconds: float
    """Seconds that the training waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Payload):
    """A save failed; the previous checkpoint stays the newest."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Payload):
    """Anything a person should know; never needed to fold state."""

    kind: ClassVar[str] = "notice"
    message: str
    level: Level = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped(Payload):
    """Any writer: events are missing here, because the queue was full or the disk did not take them."""

    kind: ClassVar[str] = "events_dropped"
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(Payload):
    """A rank is about to exit because of an exception."""

    kind: ClassVar[str] = "rank_failed"
    error: str
    """Type and message."""
    error_class: ErrorClass
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished(Payload):
    """A rank leaves in agreement with all others."""

    kind: ClassVar[str] = "rank_finished"
    reason: LeavesAs
    step: int


# ---- written by agents and by the supervisor
# -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample(Payload):
    """Health of one node, a few times a minute."""

    kind: ClassVar[str] = "node_sample"
    node: int
    host: str
    cpu_percent: float
    memory_used: int
    memory_total: int
    ranks_alive: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted(Payload):
    """Supervisor: ranks are being started."""

    kind: ClassVar[str] = "attempt_started"
    world_size: int
    nodes: tuple[str, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """first | resume | the finding that ended the attempt before"""
    rung: int = 0
    """Nodes that the rung of the ladder is made for; 0: the planned layout."""
    idle: tuple[str, ...] = ()
    """Nodes that are left and not used: spares."""
    membership: str = ""
    """Why other nodes or another layout run than were planned; empty when they are as planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Payload):
    """Supervisor: a detector's finding."""

    kind: ClassVar[str] = "found"
    finding: FindingKind
    message: str
    rank: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Payload):
    """Supervisor: what the policy chose."""

    kind: ClassVar[str] = "decided"
    action: Action
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Payload):
    """Supervisor: nothing of the attempt runs any more (verified)."""

    kind: ClassVar[str] = "attempt_ended"
    outcome: AttemptOutcome
    cause: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Payload):
    """Supervisor: the run's exit code is known."""

    kind: ClassVar[str] = "run_ended"
    exit_status: int
    message: str
