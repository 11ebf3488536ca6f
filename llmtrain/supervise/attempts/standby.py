"""Warm standby: while an attempt trains steadily, the next one's ranks are started and wait.

Most of a restart is the import of torch by every rank at once. Ranks in standby have that behind them: they
hold no device, no data and no place in a process group, and know only the attempt that they are for. When
that attempt is to run on the same nodes in the same layout, they are let go; else they are ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from llmtrain.agent import messages
from llmtrain.events.state import RunState
from llmtrain.run.job_file import JobFile
from llmtrain.supervise.attempts.crew import Crew
from llmtrain.supervise.attempts.start_up import StartUp
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.detection.detect import detect
from llmtrain.supervise.session import Session

RETRY_SECONDS = 600.0
"""After a standby that broke, until the next one is tried."""
END_SECONDS = 10.0
"""For ranks in standby, which have nothing to save, to be ended; then their agents are cut off."""
STEPS_BEFORE = 3
"""Steps that an attempt has to have finished."""
WORTH_FACTOR = 2.0
"""A standby is not worth its start when the training ends within so many times the wait before it."""
TIME_IS_UP = "its ranks have waited for as long as they may"
"""They leave after a day, and younger ones take their place."""

Note = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbySettings:
    """The recipe's wishes."""

    is_wanted: bool
    after: float
    """Seconds of training in an attempt before the next one's ranks are started."""
    steps: int
    """Of the whole training."""


def standby_settings(job: JobFile) -> StandbySettings:
    """Whether and when a run's recipe wants ranks in standby."""
    recipe = job.spec.recipe
    return StandbySettings(
        # Ranks in standby have read their attempt's files already; elsewhere those come later.
        is_wanted=recipe.faults.standby and job.spec.cluster.storage.shared == "everywhere",
        after=recipe.faults.standby_after,
        steps=int(recipe.train.steps or 0),
    )


def is_due(state: RunState, attempt: int, settings: StandbySettings, running: float) -> bool:
    """Whether the next attempt's ranks should be started: the attempt has trained for a while and has as much
    left. `running`: seconds since its ranks were started."""
    own = next((each for each in state.attempts if each.number == attempt), None)
    if not settings.is_wanted or own is None or own.steps_seen < STEPS_BEFORE or running < settings.after:
        return False
    left = (settings.steps - (own.last_step or 0)) * own.mean_step_seconds
    return left > WORTH_FACTOR * settings.after


class _Stage(Enum):
    STARTING = auto()
    WAITING = auto()
    BROKEN = auto()


class Standby(threading.Thread):
    """Starts one attempt's ranks in standby and keeps their agents company, beside the watch of another."""

    def __init__(self, session: Session, plan: AttemptPlan) -> None:
        super().__init__(name=f"standby-{plan.number}", daemon=True)
        self.plan, self.stage, self.why_broken = plan, _Stage.STARTING, ""
        self._crew, self._limits = Crew(session.run, plan, session.backend, standby=True), session.limits
        self._end, self._is_taken = threading.Event(), False
        self._start_up = StartUp(
            self._crew,
            session.limits,
            environment=session.environment(),
            is_stop_wanted=self._end.is_set,
        )

    def run(self) -> None:
        """Start, wait, and unless the ranks were taken, end them."""
        try:
            finding = self._start_up.start(standby=True)
            self.why_broken = "" if finding is None else finding.message
            self.stage = _Stage.WAITING
            while not self._end.is_set() and not self.why_broken:
                self._crew.pump()
                self.why_broken = self._fault()
        except Exception as error:  # Whatever it is, the attempt that trains must not notice.
            self.why_broken = f"{type(error).__name__}: {error}"
        if self.why_broken or not self._is_taken:
            self.stage = _Stage.BROKEN
            self._tear_down()

    def take(self) -> Crew | None:
        """The waiting ranks' agents, which from now on are the caller's; None when they are not fit, or not
        there yet."""
        if self.stage is not _Stage.WAITING:
            return None
        self._is_taken = True
        self.end()
        return self._crew if not self.is_alive() and not self.why_broken else None

    def end(self) -> None:
        """End the ranks unless they are taken, and wait for that within a limit."""
        self._end.set()
        self.join(2 * END_SECONDS)

    def _fault(self) -> str:
        reports = self._crew.reports
        declined = [report for report in reports.nodes.values() if report.declined]
        if declined:
            return f"{declined[0].name}: {declined[0].declined}"
        ended = [report.script_ended for report in reports.nodes.values() if report.script_ended]
        if ended:
            return "its ranks have left" if any(script.exit_code for script in ended) else TIME_IS_UP
        found = detect(self._crew.state, reports, self._limits, time.monotonic())
        return found[0].message if found else ""

    def _tear_down(self) -> None:
        self._crew.fleet.send_all(messages.Stop(grace=0.0))
        self._crew.wait(self._crew.is_gone, END_SECONDS)
        self._crew.fleet.cut()


class StandbyKeeper:
    """Has the next attempt's ranks ready where that is wanted; lives as long as the supervisor."""

    def __init__(self, session: Session) -> None:
        self._session, self._settings = session, standby_settings(session.job)
        self._standby: Standby | None = None
        self._not_before = 0.0

    def look(self, crew: Crew, note: Note) -> None:
        """Start the ranks of the attempt after the crew's when that is due; say what became of them."""
        now = time.monotonic()
        if self._standby is None:
            running = now - (crew.reports.started or now)
            if now >= self._not_before and is_due(crew.state, crew.plan.number, self._settings, running):
                self._not_before = now + RETRY_SECONDS
                self._standby = Standby(self._session, replace(crew.plan, number=crew.plan.number + 1))
                self._standby.start()
        elif self._standby.stage is _Stage.BROKEN:
            if (why := self._standby.why_broken) != TIME_IS_UP:
                note(f"no ranks wait in standby for a restart: {why}", level="info")
            self._standby = None

    def take(self, plan: AttemptPlan) -> Crew | None:
        """The agents of ranks that wait for this very attempt; all others are ended."""
        standby, self._standby, self._not_before = self._standby, None, 0.0
        if standby is None:
            return None
        crew = standby.take() if standby.plan.has_ranks_of(plan) else None
        if crew is None:
            standby.end()
        return crew

    def end(self) -> None:
        """End the ranks that wait."""
        if self._standby is not None:
            self._standby.end()
            self._standby = None
