"""RunState: everything known of a run at one moment. Made by `state.apply` only; views read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmtrain.errors import ExitStatus
from llmtrain.events.curve import Curve
from llmtrain.events.records import (
    AttemptState,
    CheckpointPoint,
    Ending,
    EvaluationPoint,
    Member,
    Moment,
    NodeState,
    RankState,
    RankStatus,
    Reactions,
    RunStatus,
    SaveInterval,
    StepPoint,
)

ENDED_AS: dict[int, RunStatus] = {
    ExitStatus.DONE: RunStatus.FINISHED,
    ExitStatus.RESUMABLE: RunStatus.STOPPED,
}
"""What exit codes make of a run; every other one is a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything known of a run at one moment. `ranks` and `nodes` are those of the newest attempt."""

    run: str = ""
    total_steps: int | None = None
    """Steps that the run shall take, from the job file; None when unknown."""
    attempt: int = 0
    """Newest attempt, 0 before the first."""
    last_event: float | None = None
    """Time of the newest event, epoch seconds."""
    history: Curve[StepPoint] = field(default_factory=Curve)
    recent: tuple[StepPoint, ...] = ()
    """Last steps of the newest attempt that made one, ascending."""
    evaluations: Curve[EvaluationPoint] = field(default_factory=Curve)
    checkpoints: tuple[CheckpointPoint, ...] = ()
    """Newest commits that still count, ascending."""
    save_interval: SaveInterval | None = None
    """How often they are written; None before any rank has said so."""
    attempts: tuple[AttemptState, ...] = ()
    """Ascending."""
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    nodes: Mapping[int, NodeState] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    """Every node by name, also spares and those that were lost, over all attempts."""
    moments: tuple[Moment, ...] = ()
    """Newest sentences worth telling, in order of time."""
    events_dropped: int = 0
    reactions: Reactions = field(default_factory=Reactions)
    ending: Ending | None = None

    @property
    def step(self) -> int:
        """Highest step that the current weights contain."""
        progress = (attempt.progress for attempt in reversed(self.attempts))
        return next((step for step in progress if step is not None), 0)

    @property
    def latest(self) -> StepPoint | None:
        """The newest finished step that counts."""
        return self.recent[-1] if self.recent else self.history.last

    @property
    def current(self) -> AttemptState | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def ended(self) -> Ending | None:
        """How the run ended, or None while it goes on."""
        return self.ending if self.ending and self.ending.attempt >= self.attempt else None

    @property
    def restarts(self) -> int:
        """Attempts after the first."""
        return max(0, self.attempt - 1)

    @property
    def status(self) -> RunStatus:
        """What the run is doing as far as its events tell: never `created` or `interrupted`."""
        if self.ended:
            return ENDED_AS.get(self.ended.exit_status, RunStatus.FAILED)
        current = self.current
        if current is None:
            return RunStatus.PREPARING
        if current.outcome:
            return RunStatus.RESTARTING
        if current.first_step is not None:
            return RunStatus.RUNNING
        return RunStatus.STARTING if current.reason in ("", "first", "resume") else RunStatus.RESTARTING

    @property
    def tokens_per_second(self) -> float | None:
        """Mean over the recent steps."""
        seconds = sum(point.seconds for point in self.recent)
        return sum(point.tokens for point in self.recent) / seconds if seconds > 0 else None

    @property
    def seconds_per_step(self) -> float | None:
        """Wall time a step over the recent ones, with the validations and checkpoints between them."""
        if len(self.recent) < 2:
            return self.recent[0].seconds if self.recent else None
        first, last = self.recent[0], self.recent[-1]
        return (last.time - first.time) / (last.step - first.step)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds of training left at the recent pace; None when unknown or over."""
        pace = self.seconds_per_step
        if self.total_steps is None or pace is None or pace < 0 or self.ended:
            return None
        return max(0, self.total_steps - self.step) * pace

    def is_alive(self, rank: int) -> bool:
        """Whether a rank's process is believed to run."""
        found, current = self.ranks.get(rank), self.current
        running = found is not None and found.status in (RankStatus.STARTING, RankStatus.RUNNING)
        return running and current is not None and not current.outcome and not self.ended
