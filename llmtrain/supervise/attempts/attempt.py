"""One attempt: start the agents, start the ranks, watch, and leave nothing behind."""

from __future__ import annotations

import time

from llmtrain.agent import messages
from llmtrain.events.event import Event
from llmtrain.events.schema import Found, Notice, RankStep
from llmtrain.events.watching import SlowRank
from llmtrain.events.words import Level
from llmtrain.events.writer import EventWriter
from llmtrain.supervise.attempts.crew import Crew
from llmtrain.supervise.attempts.gain import GainWatch
from llmtrain.supervise.attempts.inquiry import Inquiry
from llmtrain.supervise.attempts.standby import StandbyKeeper
from llmtrain.supervise.attempts.start_up import StartUp
from llmtrain.supervise.attempts.tear_down import TearDown
from llmtrain.supervise.decision.attempt_plan import AttemptPlan, AttemptResult
from llmtrain.supervise.decision.policy import AttemptEnd
from llmtrain.supervise.detection.detect import Finding, detect, ended_well
from llmtrain.supervise.detection.pace import Pace
from llmtrain.supervise.detection.stragglers import Straggler, stragglers_of
from llmtrain.supervise.explanation.causes import CLASSES
from llmtrain.supervise.explanation.post_mortem import examine, write_post_mortem
from llmtrain.supervise.session import Session

SETTLE_SECONDS = 0.5
"""How long a finding that is more likely a consequence waits for its cause."""


class AttemptRunner:
    """Runs one attempt to its end."""

    def __init__(
        self,
        session: Session,
        plan: AttemptPlan,
        writer: EventWriter,
        *,
        standby: StandbyKeeper,
        gains: GainWatch,
        pace: Pace,
    ) -> None:
        """`gains` says when to end it for a better one; `pace` is that of the attempt before."""
        self._session, self._plan, self._writer = session, plan, writer
        self._limits, self._control = session.limits, session.control
        self._attempt = session.run.attempt(plan.number)
        self._standby, self._gains = standby, gains
        self._found: list[Finding] = []
        waiting = standby.take(plan)
        self._is_warm = waiting is not None
        self._crew = waiting or Crew(session.run, plan, session.backend)
        self._crew.note, self._crew.renew = self._note, session.renew
        self._crew.on_event = self._on_event
        self._crew.reports.pace = pace.for_next_attempt()
        self._stragglers = stragglers_of(plan.layout, session.job.spec.recipe.batch)
        self._start_up = StartUp(
            self._crew,
            session.limits,
            environment=session.environment(),
            when_orphaned=session.orphan_command(),
            is_stop_wanted=lambda: session.control.wish() is not None,
        )
        self._inquiry = Inquiry(self._crew, session.limits)
        self._tear_down = TearDown(session, self._crew)

    @property
    def pace(self) -> Pace:
        """How long steps and phases have taken so far."""
        return self._crew.reports.pace

    def run(self) -> AttemptResult:
        """Start, watch and tear down; whatever happens, nothing is left running that could be ended."""
        finding: Finding | None = None
        try:
            finding = self._start() or self._watch()
            if finding is not None:
                self._emit_finding(finding)
                self._inquire(finding)
        finally:
            self._end_all(finding)
        return self._result(finding)

    def _start(self) -> Finding | None:
        if not self._is_warm:
            return self._start_up.start()
        self._note("ranks that were waiting in standby go on", level="info")
        self._start_up.release()
        return None

    def _watch(self) -> Finding | None:
        """The finding that ends the attempt; None when its ranks left in order, or when a stop is wanted."""
        crew = self._crew
        while crew.reports.started is not None:
            crew.pump()
            found = detect(crew.state, crew.reports, self._limits, time.monotonic())
            if (found or crew.reports.are_all_told()) and self._control.hear_of(
                lambda seconds: crew.wait(crew.reports.are_all_told, seconds)
            ):
                return None
            if found and not self._may_be_an_echo(found[0]):
                first = found[0] if found[0].kind != "hang" else self._inquiry.confirm(found[0])
                if first is not None:
                    return first
            if ended_well(crew.reports) or self._control.wish() is not None:
                return None
            if gain := self._gains.look(crew.state):
                self._note(f"the ranks save and leave: {gain}", level="info")
                return None
            self._standby.look(crew, self._note)
        return None

    def _on_event(self, event: Event) -> None:
        """Compare ranks by their own times."""
        if not isinstance(event.payload, RankStep) or event.rank is None:
            return
        own = event.payload
        for slow in self._stragglers.observe(
            event.rank, own.step, own.compute_seconds, own.steps, own.core_wait_seconds
        ):
            node = self._crew.reports.node_of.get(slow.rank)
            name = "" if node is None else self._crew.name(node)
            self._tell_slow(slow, name)
            self._gains.hear_of(slow, name)

    def _tell_slow(self, slow: Straggler, node: str) -> None:
        self._writer.emit(
            SlowRank(
                rank=slow.rank,
                node=node,
                excess=slow.excess,
                step=slow.step,
                peers=slow.peers,
                confirmed=slow.is_confirmed,
            )
        )

    def _may_be_an_echo(self, finding: Finding) -> bool:
        """Whether the cause of a consequence may still be on its way."""
        return finding.is_echo and time.monotonic() - finding.at < SETTLE_SECONDS

    # ---- the end
    def _inquire(self, finding: Finding) -> None:
        """Have it said what every rank does, while that can still be seen."""
        if finding.kind == "hang":
            self._crew.fleet.send_all(messages.DumpStacks())
            self._crew.wait(lambda: False, self._limits.stacks)
        else:
            self._inquiry.ask(self._limits.look)
        crew = self._crew
        others = detect(crew.state, crew.reports, self._limits, time.monotonic())
        self._found = [finding, *(other for other in others if other.message != finding.message)]

    def _end_all(self, finding: Finding | None) -> None:
        self._tear_down.end(in_order=finding is None, note=self._note, leaves_for=self._gains.gain)
        if self._found:
            self._write_post_mortem()

    def _write_post_mortem(self) -> None:
        crew = self._crew
        try:
            told = examine(
                self._attempt,
                self._session.run.run_id,
                self._found,
                crew.reports,
                crew.state,
                on_gpu=self._session.job.spec.cluster.accelerator != "cpu",
            )
            path = write_post_mortem(self._attempt, told)
        except OSError as error:
            self._note(f"no post-mortem could be written: {error}")
            return
        self._note(f"{CLASSES[told.cause]}; post-mortem: {path}", level="info")

    def _note(self, text: str, level: Level = "warning") -> None:
        self._writer.emit(Notice(message=text, level=level))

    def _emit_finding(self, finding: Finding) -> None:
        self._writer.emit(
            Found(finding=finding.kind, message=finding.message, rank=finding.rank, node=finding.node)
        )

    def _result(self, finding: Finding | None) -> AttemptResult:
        state = self._crew.state
        own = next((each for each in state.attempts if each.number == self._plan.number), None)
        checkpoints = [point.step for point in state.checkpoints]
        return AttemptResult(
            end=self._end(finding),
            reached_step=(own.last_step or 0) if own is not None else 0,
            committed_step=max(checkpoints, default=0),
            unreachable=tuple(self._crew.unreachable),
        )

    def _end(self, finding: Finding | None) -> AttemptEnd:
        stop_wanted = self._control.wish() is not None
        ended = ended_well(self._crew.reports, stop_wanted=stop_wanted)
        if finding is None and ended is not None:
            left_for = self._gains.gain if ended == "stopped" else ""
            return AttemptEnd(
                outcome=ended,
                stop_wanted=stop_wanted,
                cause=self._gains.cause if left_for else "",
                message=left_for,
                gain=left_for,
            )
        if finding is None:
            why = self._tear_down.why_nothing_saved()
            return AttemptEnd(outcome="failed", stop_wanted=stop_wanted, cause="stop", message=why)
        return AttemptEnd(
            outcome="failed",
            stop_wanted=stop_wanted,
            cause=finding.kind,
            message=finding.message,
            error_class=finding.error_class,
            step=finding.step,
        )
