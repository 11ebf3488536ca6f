"""The loop over attempts of one run: prepare, start, watch, look back, decide, until the run has ended."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from llmtrain.backends.base import Backend
from llmtrain.config.codec import to_json
from llmtrain.errors import ExitStatus, LlmtrainError
from llmtrain.events.schema import AttemptEnded, AttemptStarted, Decided, Notice, RunEnded
from llmtrain.events.words import NodeStatus
from llmtrain.events.writer import EventWriter
from llmtrain.plan.placement import rank_order
from llmtrain.run.checkpoints import ever_committed, last_committed
from llmtrain.run.job_file import AttemptFile, JobFile, write_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import Lease
from llmtrain.run.record import AttemptRecord, RunRecord, read_record, write_record
from llmtrain.supervise.attempts.attempt import AttemptRunner
from llmtrain.supervise.attempts.gain import gain_watch
from llmtrain.supervise.attempts.standby import StandbyKeeper
from llmtrain.supervise.control import Control
from llmtrain.supervise.corpus import StopWantedError, ensure_corpus
from llmtrain.supervise.decision.attempt_plan import AttemptPlan, AttemptResult
from llmtrain.supervise.decision.failure_rate import expected_between
from llmtrain.supervise.decision.policy import Budget, Decision, History, decide, not_begun, past_budget
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.detection.pace import Pace
from llmtrain.supervise.look_back import close_abandoned
from llmtrain.supervise.nodes.fleet import sweep_nodes
from llmtrain.supervise.nodes.members import Members
from llmtrain.supervise.nodes.membership import node_changes, with_losses
from llmtrain.supervise.nodes.node_memory import NodeMemory
from llmtrain.supervise.session import Session
from llmtrain.supervise.waiting import plan_or_wait


class Supervisor:
    """Drives one run while it holds the lease; `run` returns the run's exit code."""

    def __init__(
        self, run: RunDir, job: JobFile, backend: Backend, lease: Lease, *, control: Control, limits: Limits
    ) -> None:
        self._run_dir, self._job, self._backend, self._lease = run, job, backend, lease
        self._control, self._limits = control, limits
        self._session = Session(
            run=run, job=job, backend=backend, limits=limits, control=control, renew=lease.renew
        )
        self._record = read_record(run)
        self._pace = Pace()
        self._members = Members(run, job, backend, limits)
        self._memory = NodeMemory(run, job, backend, created=self._record.created)
        self._standby = StandbyKeeper(self._session)
        self._writer: EventWriter | None = None
        self._told: dict[str, NodeStatus] = {}
        """What was said last of nodes that were lost at some time."""

    def run(self) -> ExitStatus:
        """Run attempts until the run has ended."""
        try:
            return self._run()
        finally:
            self._standby.end()

    def _run(self) -> ExitStatus:
        self._take_over()
        first = number = 1 + max([*self._run_dir.attempt_numbers(), 0])
        reason = "first" if first == 1 else "resume"
        while True:
            self._writer = writer = self._open_writer(number)
            try:
                decision = self._one_attempt(number, first, reason, writer)
                if decision.action != "restart":
                    return self._end(decision, writer)
            finally:
                writer.close()
            self._control.sleep(decision.delay)
            number, reason = number + 1, decision.reason

    def tell(self, message: str) -> None:
        """A warning for people that concerns no attempt; before the first one it goes to the log."""
        if self._writer is None:
            sys.stderr.write(f"{message}\n")
        else:
            self._writer.emit(Notice(message=message, level="warning"))

    # ---- before the first attempt
    def _take_over(self) -> None:
        """Wait for what an earlier supervisor left to save and leave, end what does not, and say so."""
        record = self._members.enter(self._record)
        numbers = self._run_dir.attempt_numbers()
        unfinished = [each for each in self._record.attempts if each.outcome == "running"]
        if numbers:
            swept, unreachable = sweep_nodes(
                self._run_dir,
                self._backend,
                self._members.nodes,
                older_than=numbers[-1] + 1,
                grace=self._limits.save if unfinished else 0.0,
            )
            for name, word in {**swept, **unreachable}.items():
                sys.stderr.write(f"{name}: {word}\n")
        for attempt in unfinished:
            record = record.with_attempt(close_abandoned(self._run_dir, attempt))
        self._save(replace(record, stage="running", exit_status=None, message="", stop_requested=False))

    @property
    def _budget(self) -> Budget:
        faults = self._job.spec.recipe.faults
        return Budget(
            nodes=len(self._record.nodes),
            node_loss=faults.node_loss_budget,
            restarts_without_progress=faults.restarts_without_progress,
            fewest_nodes=self._members.fewest_allowed,
        )

    def _open_writer(self, number: int) -> EventWriter:
        return EventWriter(
            self._run_dir.attempt(number).supervisor_events,
            run=self._run_dir.run_id,
            attempt=number,
            source="supervisor",
        )

    # ---- one attempt
    def _one_attempt(self, number: int, first: int, reason: str, writer: EventWriter) -> Decision:
        started = time.time()
        try:
            if self._control.wish() is not None:
                raise StopWantedError
            if number != first:
                self._save(self._members.look_again(self._record))
            if end := past_budget(self._record.lost_nodes, self._budget):
                return end
            ensure_corpus(self._run_dir, self._job.spec.recipe, self._control, writer)
            plan = self._plan(number, writer)
        except StopWantedError:
            return not_begun(None, is_leaving=True)
        except LlmtrainError as error:
            return not_begun(error, is_leaving=self._control.is_leaving())
        record = AttemptRecord(number=number, started=started, nodes=tuple(node.name for node in plan.nodes))
        self._begin(plan, record, reason, writer)
        clock = time.monotonic()
        runner = AttemptRunner(
            self._session,
            plan,
            writer,
            standby=self._standby,
            gains=gain_watch(self._session, self._members, self._record, plan),
            pace=self._pace,
        )
        result = runner.run()
        self._pace = runner.pace
        self._finish(record, result, time.monotonic() - clock, writer)
        return self._decide(result, first, writer)

    def _plan(self, number: int, writer: EventWriter) -> AttemptPlan:
        return plan_or_wait(
            self._session,
            self._members,
            self._record,
            number,
            save=self._save,
            note=lambda text: writer.emit(Notice(message=text, level="warning")),
        )

    def _begin(self, plan: AttemptPlan, record: AttemptRecord, reason: str, writer: EventWriter) -> None:
        attempt = self._run_dir.attempt(plan.number)
        for folder in (attempt.events, attempt.logs, attempt.stacks, self._run_dir.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        self._lease.check()
        has_history = ever_committed(self._run_dir.checkpoints)  # also when it starts from imported weights
        file = AttemptFile(
            number=plan.number,
            layout=plan.layout,
            nodes=record.nodes,
            ranks=rank_order(plan.layout, self._job.spec.cluster.gpus_per_node),
            restore="newest" if plan.number > 1 or has_history else "fresh",
            snapshot=self._snapshot_for(plan, writer),
            run_created=self._record.created,
            between_failures=expected_between(
                self._record.attempts, self._job.spec.cluster.failures.node_mtbf, len(plan.nodes)
            ),
        )
        write_attempt_file(attempt.attempt_json, file)
        self._save(self._record.with_attempt(record))
        writer.emit(
            AttemptStarted(
                world_size=plan.layout.world_size,
                nodes=record.nodes,
                layout=to_json(plan.layout),
                reason=reason,
                rung=plan.rung,
                idle=plan.idle,
                membership=plan.membership,
            )
        )
        self._tell_nodes(writer)

    def _snapshot_for(self, plan: AttemptPlan, writer: EventWriter) -> str:
        """The snapshot in the nodes' memory that an attempt goes on from; empty: none, or none is newer."""
        if plan.number == 1:
            return ""
        out = {*self._record.away, *(node.name for node in plan.nodes)}
        idle = [node for node in self._members.nodes if node.name not in out]
        return self._memory.choose(plan.nodes, idle, lambda text: writer.emit(Notice(message=text)))

    def _tell_nodes(self, writer: EventWriter) -> None:
        """Say which nodes are left out, or not any more."""
        for change in node_changes(self._told, self._record, time.time(), self._limits.quarantine):
            self._told[change.node] = change.state
            writer.emit(change)

    def _finish(
        self, record: AttemptRecord, result: AttemptResult, seconds: float, writer: EventWriter
    ) -> None:
        end = result.end
        writer.emit(AttemptEnded(outcome=end.outcome, cause=end.message or end.cause, seconds=seconds))
        ended = replace(
            record,
            ended=time.time(),
            outcome=end.outcome,
            cause=end.cause,
            error=end.message,
            reached_step=result.reached_step,
            committed_step=result.committed_step,
        )
        why = end.message or end.cause
        self._save(with_losses(self._record.with_attempt(ended), result.unreachable, why, time.time()))
        self._tell_nodes(writer)

    def _decide(self, result: AttemptResult, first: int, writer: EventWriter) -> Decision:
        history = History(
            attempts=self._record.attempts, first_of_session=first, lost_nodes=self._record.lost_nodes
        )
        decision = decide(result.end, history, self._budget)
        writer.emit(Decided(action=decision.action, reason=decision.reason))
        return decision

    # ---- the end
    def _end(self, decision: Decision, writer: EventWriter) -> ExitStatus:
        message = decision.reason
        if decision.action == "stop" or decision.short_of_nodes:
            # On disk may be one whose event died with rank 0; or none, where disks are not shared.
            last = last_committed(self._run_dir.checkpoints)
            step = last.step if last else self._record.committed_step
            where = f"newest checkpoint: step {step}" if step else "there is no checkpoint yet"
            message = f"{decision.reason}; {where}; {self._how_to_go_on(decision)}"
        ended = replace(
            self._record,
            stage="ended",
            exit_status=int(decision.exit_status),
            message=message,
            stop_requested=self._control.is_requested,
        )
        reached = max((attempt.reached_step for attempt in self._record.attempts), default=0)
        self._memory.drop(self._members.nodes, reached=reached)
        if self._record.away and self._control.wish() != 0.0:
            self._members.sweep_returned(self._record, self.tell)
        self._save(ended)
        self._control.forget()
        writer.emit(RunEnded(exit_status=int(decision.exit_status), message=message))
        return decision.exit_status

    def _how_to_go_on(self, decision: Decision) -> str:
        resume = f"llmtrain resume {self._run_dir.argument}"
        left = self._members.left(self._record)
        if not decision.short_of_nodes or not left:
            return f"go on with `{resume}`"
        nodes = f"the {left} nodes" if left > 1 else "the node"
        return f"go on with `{resume}` once nodes are back, or on {nodes} left with `{resume} --nodes {left}`"

    def _save(self, record: RunRecord) -> None:
        write_record(self._run_dir, record, self._lease)
        self._members.remember(self._record, record)
        self._record = record
