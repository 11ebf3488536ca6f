"""The parts of a run's state: steps, ranks, nodes, attempts, checkpoints and what is worth telling a
person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from llmtrain.events.words import (
    AttemptOutcome,
    FindingKind,
    IntervalSource,
    Level,
    NodeStatus,
    Phase,
    Source,
)


class RunStatus(StrEnum):
    """What a run is doing, in the word that every view, `status --json` and the metrics show."""

    CREATED = "created"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """By its events it goes on, but nobody is in charge of it."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of the run by itself."""
        return self in (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED, RunStatus.INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One optimizer step, as rank 0 reported it."""

    step: int
    attempt: int
    time: float
    """End of the step, epoch seconds."""
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens: int
    tokens_per_second: float
    mfu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """One validation."""

    step: int
    attempt: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPoint:
    """One committed checkpoint."""

    step: int
    attempt: int
    name: str
    time: float
    """Moment of the commit, epoch seconds."""
    bytes: int
    seconds: float
    stall_seconds: float | None = None
    """Seconds that the training waited for it; None: all of `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInterval:
    """How often checkpoints are written, as rank 0 said last; see `saving.SaveIntervalSet`."""

    attempt: int
    every_steps: int | None
    seconds: float
    source: IntervalSource
    stall_seconds: float
    between_failures: float


class RankStatus(StrEnum):
    """What is known of a rank of the newest attempt; a later one in this list wins, whatever the order of
    events."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    DEAD = "dead"
    FAILED = "failed"


RANK_STATUS_ORDER = tuple(RankStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank of the newest attempt."""

    rank: int
    attempt: int
    status: RankStatus = RankStatus.STARTING
    phase: Phase = "start"
    phase_time: float = 0.0
    """When it entered this phase, epoch seconds."""
    step: int = 0
    """Step that it works on, or finished last."""
    last_seen: float = 0.0
    """Time of its last event, epoch seconds."""
    host: str = ""
    pid: int | None = None
    local_rank: int | None = None
    memory_bytes: int | None = None
    step_seconds: float | None = None
    compute_seconds: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The last health sample of a node."""

    node: int
    attempt: int
    host: str
    time: float
    cpu_percent: float
    memory_used: int
    memory_total: int
    ranks_alive: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that the run has or had, in use or not."""

    node: str
    status: NodeStatus
    attempt: int
    """Attempt in which it came into this state."""
    since: float
    """Epoch seconds."""
    reason: str = ""
    until: float | None = None
    """End of a quarantine, epoch seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptState:
    """One start of ranks: how it went and where its time went. Sums are over the events seen."""

    number: int
    started: float | None = None
    ended: float | None = None
    reason: str = ""
    """first | resume | the finding that ended the attempt before"""
    outcome: AttemptOutcome | Literal["ended", ""] = ""
    """`ended`: nobody said how; empty while it runs."""
    cause: str = ""
    finding: FindingKind | Literal[""] = ""
    """Kind of the first finding in it; empty when there was none."""
    seconds: float | None = None
    nodes: tuple[str, ...] = ()
    world_size: int = 0
    layout: dict[str, Any] = field(default_factory=dict)
    rung: int = 0
    """Nodes that its rung of the ladder is made for; 0: the planned layout."""
    idle: tuple[str, ...] = ()
    membership: str = ""
    """Why it ran on other nodes or in another layout than planned."""
    restored_step: int | None = None
    restored_checkpoint: str | None = None
    first_step: int | None = None
    first_step_time: float | None = None
    """End of its first step, epoch seconds."""
    last_step: int | None = None
    last_step_time: float | None = None
    steps_seen: int = 0
    step_seconds: float = 0.0
    tokens_seen: int = 0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    load_began: float | None = None
    """When rank 0 began to restore a state, epoch seconds."""
    load_seconds: float = 0.0
    found_time: float | None = None
    """When its first finding was told, epoch seconds."""

    @property
    def steps(self) -> int:
        """Steps that it finished, also those whose events were not read."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1

    @property
    def mean_step_seconds(self) -> float:
        """Mean duration of the steps seen; 0 when there was none."""
        return self.step_seconds / self.steps_seen if self.steps_seen else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of its steps, also of those whose events were not read."""
        return round(self.steps * self.tokens_seen / self.steps_seen) if self.steps_seen else 0

    @property
    def progress(self) -> int | None:
        """Highest step that its weights contained, or None when it never got weights."""
        known = [step for step in (self.restored_step, self.last_step) if step is not None]
        return max(known, default=None)


Place = tuple[int, int]
"""Attempt and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reactions:
    """What was done about bad numbers, over all attempts; a step done again after a restart counts again."""

    recomputed: int = 0
    """Steps computed again in FP32."""
    skipped: int = 0
    """Stretches of data whose steps did not change the weights."""
    skipped_windows: tuple[tuple[int, int], ...] = ()
    """First sample and the one after the last of what was skipped, ascending, apart; a rewind covers what was
    skipped before it."""
    rewound: int = 0
    """Returns to an earlier step's weights."""
    spikes: int = 0
    alarms: int = 0
    """Layers whose gradient did not fit the format, each time."""
    corruptions: int = 0
    injected: int = 0
    """Faults made on purpose: a rehearsal."""
    scale: float | None = None
    """Loss scale; None unless it has ever changed."""
    overflows: int = 0
    scale_place: Place = (0, 0)
    layers: Mapping[str, tuple[Place, str]] = field(default_factory=dict)
    """Layer -> when it last changed, and its wider format, or "" when it is back to normal."""

    @property
    def skipped_samples(self) -> int:
        """Samples that did not change the weights, each once."""
        return sum(stop - first for first, stop in self.skipped_windows)

    @property
    def wide_layers(self) -> dict[str, str]:
        """Layers that compute in a wider format than the rest, each with it."""
        return {layer: precision for layer, (_, precision) in sorted(self.layers.items()) if precision}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One sentence worth telling a person."""

    time: float
    attempt: int
    level: Level
    text: str
    source: Source | Literal[""] = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the run ended; void as soon as a newer attempt starts."""

    attempt: int
    time: float
    exit_status: int
    message: str
