"""From an attempt's end to what happens next. Pure: a function of the end, the history and the budget.

The rules stand in `RULES`, in order; the first that has an answer decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.backends.preflight import PreflightError
from llmtrain.errors import ExitStatus, InfeasibleError, LlmtrainError
from llmtrain.events.words import Action, AttemptOutcome, EndCause, ErrorClass
from llmtrain.run.record import AttemptRecord

HOPELESS: dict[ErrorClass | Literal[""], ExitStatus] = {
    "config": ExitStatus.FAILED,
    "numeric": ExitStatus.DO_NOT_RESTART,
    "checkpoint": ExitStatus.DO_NOT_RESTART,
}
"""Error classes that a restart would only meet again: the same job file, the same data in the same order,
the same damaged checkpoints."""

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds of back-off: none after progress, then doubling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the recipe allows."""

    nodes: int
    """Nodes at launch."""
    node_loss: float
    """Share of them that may be lost."""
    restarts_without_progress: int
    fewest_nodes: int | None = None
    """Nodes that a person lets the run go on with."""

    @property
    def losable_nodes(self) -> int:
        """Distinct nodes that may be lost; the small addition undoes binary rounding (0.2 x 5 = 1)."""
        by_recipe = int(self.node_loss * self.nodes + 1e-9)
        return by_recipe if self.fewest_nodes is None else max(by_recipe, self.nodes - self.fewest_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended."""

    outcome: AttemptOutcome
    stop_wanted: bool = False
    """Whether somebody had asked for a stop."""
    cause: EndCause | Literal[""] = ""
    message: str = ""
    error_class: ErrorClass | Literal[""] = ""
    step: int = 0
    """Step that a failed rank was in."""
    gain: str = ""
    """What it was ended in order for: nodes that are back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What went before."""

    attempts: Sequence[AttemptRecord]
    """All attempts of the run, the one that just ended last."""
    first_of_session: int
    """Number of the first attempt of this supervisor: a person who resumes gives the run a new chance."""
    lost_nodes: Sequence[str] = ()
    """Distinct nodes lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do."""

    action: Action
    reason: str
    exit_status: ExitStatus = ExitStatus.DONE
    """Of every action but `restart`."""
    delay: float = 0.0
    """Seconds to wait before a restart."""
    short_of_nodes: bool = False
    """Whether more nodes, or a person's word, would let the run go on."""


def decide(end: AttemptEnd, history: History, budget: Budget) -> Decision:
    """The next action after an attempt has ended."""
    for rule in RULES:
        decision = rule(end, history, budget)
        if decision is not None:
            return decision
    return _restart(end, history)


def past_budget(lost_nodes: Sequence[str], budget: Budget) -> Decision | None:
    """The end of a run that has lost more nodes than it may; None while it may go on."""
    lost = len(set(lost_nodes))
    if lost <= budget.losable_nodes:
        return None
    reason = (
        f"{lost} of {budget.nodes} nodes lost ({', '.join(lost_nodes)}), "
        f"the budget allows {budget.losable_nodes}"
    )
    return short_of_nodes(reason)


def not_begun(error: LlmtrainError | None, *, is_leaving: bool) -> Decision:
    """The end of a run whose attempt did not begin; `is_leaving`: a stop is wanted, and nodes may fail only
    because a scheduler is ending what runs on them."""
    if error is None or is_leaving:
        reason = "stopped before the attempt began"
        return Decision(action="stop", reason=reason, exit_status=ExitStatus.RESUMABLE)
    if isinstance(error, InfeasibleError | PreflightError):
        return short_of_nodes(str(error))
    return Decision(action="give_up", reason=error.text(), exit_status=error.exit_status)


def short_of_nodes(reason: str) -> Decision:
    """The end of a run that has too few nodes left."""
    return Decision(
        action="give_up", reason=reason, exit_status=ExitStatus.DO_NOT_RESTART, short_of_nodes=True
    )


def restarts_without_progress(history: History) -> int:
    """Restarts in a row, up to now, that reached neither a newer checkpoint nor a higher step."""
    reached = committed = count = 0
    for attempt in history.attempts:
        progressed = attempt.reached_step > reached or attempt.committed_step > committed
        reached = max(reached, attempt.reached_step)
        committed = max(committed, attempt.committed_step)
        is_restart = attempt.number > history.first_of_session
        count = count + 1 if is_restart and not progressed else 0
    return count


def _completed(end: AttemptEnd, history: History, budget: Budget) -> Decision | None:
    if end.outcome == "completed":
        return Decision(action="finish", reason="all steps are done")
    return None


def _stepped_up(end: AttemptEnd, history: History, budget: Budget) -> Decision | None:
    """It has saved and left for an attempt on more nodes."""
    if end.outcome == "stopped" and end.gain and not end.stop_wanted:
        return Decision(action="restart", reason=end.gain)
    return None


def _stopped(end: AttemptEnd, history: History, budget: Budget) -> Decision | None:
    if end.outcome == "stopped":
        reason = "stopped as asked" if end.stop_wanted else "the ranks were asked to leave"
        return Decision(action="stop", reason=reason, exit_status=ExitStatus.RESUMABLE)
    if end.stop_wanted:
        reason = f"stopped without a new checkpoint: {end.message}"
        return Decision(action="stop", reason=reason, exit_status=ExitStatus.RESUMABLE)
    return None


def _hopeless(end: AttemptEnd, history: History, budget: Budget) -> Decision | None:
    status = HOPELESS.get(end.error_class)
    if status is not None:
        reason = f"{end.message}; a restart would meet the same"
        return Decision(action="give_up", reason=reason, exit_status=status)
    return None


def _same_error_again(end: AttemptEnd, history: History, budget: Budget) -> Decision | None:
    """The training code raised the same exception in the same step, twice in a row."""
    if end.error_class != "user_code" or len(history.attempts) < 2:
        return None
    before = history.attempts[-2]
    if before.number >= history.first_of_session and before.error == end.message:
        reason = f"twice in a row: {end.message}"
        return Decision(action="give_up", reason=reason, exit_status=ExitStatus.FAILED)
    return None


def _nodes_lost(end: AttemptEnd, history: History, budget: Budget) -> Decision | None:
    return past_budget(history.lost_nodes, budget)


def _no_progress(end: AttemptEnd, history: History, budget: Budget) -> Decision | None:
    count = restarts_without_progress(history)
    if count < budget.restarts_without_progress:
        return None
    reason = f"{count} restarts in a row without a newer checkpoint or a higher step; last: {end.message}"
    return Decision(action="give_up", reason=reason, exit_status=ExitStatus.DO_NOT_RESTART)


def _restart(end: AttemptEnd, history: History) -> Decision:
    idle = restarts_without_progress(history)
    made_none = idle or not history.attempts or not history.attempts[-1].reached_step
    delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0**idle) if made_none else 0.0
    return Decision(action="restart", reason=end.message or end.cause, delay=delay)


Rule = Callable[[AttemptEnd, History, Budget], Decision | None]
RULES: tuple[Rule, ...] = (
    _completed,
    _stepped_up,
    _stopped,
    _hopeless,
    _same_error_again,
    _nodes_lost,
    _no_progress,
)
