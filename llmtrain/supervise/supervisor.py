"""The loop over attempts of one run: prepare, start, watch, look back, decide, until the run has ended."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from llmtrain.backends.base import AllocationBackend, Backend
from llmtrain.config.codec import to_json
from llmtrain.errors import ExitStatus, LlmtrainError
from llmtrain.events.schema import AttemptEnded, AttemptStarted, Decided, RunEnded
from llmtrain.events.writer import EventWriter
from llmtrain.run.checkpoints import ever_committed
from llmtrain.run.job_file import AttemptFile, JobFile, write_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import Lease
from llmtrain.run.record import AttemptRecord, RunRecord, read_record, write_record
from llmtrain.supervise.attempt import AttemptPlan, AttemptResult, AttemptRunner
from llmtrain.supervise.control import Control
from llmtrain.supervise.corpus import StopWantedError, ensure_corpus
from llmtrain.supervise.fleet import sweep_nodes
from llmtrain.supervise.limits import Limits
from llmtrain.supervise.look_back import close_abandoned
from llmtrain.supervise.membership import choose
from llmtrain.supervise.policy import Budget, Decision, History, decide


class Supervisor:
    """Drives one run while it holds the lease; `run` returns the run's exit code."""

    def __init__(
        self, run: RunDir, job: JobFile, backend: Backend, lease: Lease, *, control: Control, limits: Limits
    ) -> None:
        self._run_dir, self._job, self._backend, self._lease = run, job, backend, lease
        self._control, self._limits = control, limits
        self._record = read_record(run)
        self._nodes = tuple(backend.nodes(job.spec, run))
        faults = job.spec.recipe.faults
        self._budget = Budget(
            nodes=len(self._nodes),
            node_loss=faults.node_loss_budget,
            restarts_without_progress=faults.restarts_without_progress,
        )

    def run(self) -> ExitStatus:
        """Run attempts until the run has ended."""
        self._take_over()
        first = number = 1 + max([*self._run_dir.attempt_numbers(), 0])
        reason = "first" if first == 1 else "resume"
        while True:
            writer = self._open_writer(number)
            try:
                decision = self._one_attempt(number, first, reason, writer)
                if decision.action != "restart":
                    return self._end(decision, writer)
            finally:
                writer.close()
            self._control.sleep(decision.delay)
            number, reason = number + 1, decision.reason

    # ---- before the first attempt
    def _take_over(self) -> None:
        """Wait for what an earlier supervisor left to save and leave, end what does not, and say so."""
        self._enter_allocation()
        numbers = self._run_dir.attempt_numbers()
        unfinished = [each for each in self._record.attempts if each.outcome == "running"]
        if numbers:
            swept, unreachable = sweep_nodes(
                self._run_dir,
                self._backend,
                self._nodes,
                older_than=numbers[-1] + 1,
                grace=self._limits.save if unfinished else 0.0,
            )
            for name, word in {**swept, **unreachable}.items():
                sys.stderr.write(f"{name}: {word}\n")
        for attempt in unfinished:
            self._save(self._record.with_attempt(close_abandoned(self._run_dir, attempt)))
        self._save(replace(self._record, stage="running", exit_status=None, message="", stop_requested=False))

    def _enter_allocation(self) -> None:
        """Nodes that were lost belong to the job that had them: a new one has nodes that its scheduler
        vouches for, perhaps the same after a repair."""
        if not isinstance(self._backend, AllocationBackend):
            return
        allocation = self._backend.allocation()
        if allocation != self._record.allocation:
            self._record = replace(self._record, allocation=allocation, lost_nodes=())

    def _look_at_nodes(self, number: int, first: int) -> None:
        """Nodes that the scheduler has taken away since the last attempt are lost; raises LlmtrainError."""
        if number == first or not isinstance(self._backend, AllocationBackend):
            return
        nodes = tuple(self._backend.nodes(self._job.spec, self._run_dir))
        left = {node.name for node in nodes}
        gone = [node.name for node in self._nodes if node.name not in left]
        if gone:
            lost = tuple(dict.fromkeys((*self._record.lost_nodes, *gone)))
            self._save(replace(self._record, lost_nodes=lost))
        self._nodes = nodes

    def _open_writer(self, number: int) -> EventWriter:
        return EventWriter(
            self._run_dir.attempt(number).supervisor_events,
            run=self._run_dir.run_id,
            attempt=number,
            source="supervisor",
        )

    # ---- one attempt
    def _one_attempt(self, number: int, first: int, reason: str, writer: EventWriter) -> Decision:
        started, clock = time.time(), time.monotonic()
        try:
            self._look_at_nodes(number, first)
            ensure_corpus(self._run_dir, self._job.spec.recipe, self._control, writer)
            plan = choose(self._job, self._nodes, self._record.lost_nodes, number=number)
        except StopWantedError:
            return Decision(
                action="stop",
                reason="stopped before the first attempt",
                exit_status=ExitStatus.RESUMABLE,
            )
        except LlmtrainError as error:
            return Decision(action="give_up", reason=error.text(), exit_status=error.exit_status)
        record = AttemptRecord(number=number, started=started, nodes=tuple(node.name for node in plan.nodes))
        self._begin(plan, record, first, reason, writer)
        result = self._runner(plan, writer).run()
        self._finish(record, result, time.monotonic() - clock, writer)
        return self._decide(result, first, writer)

    def _begin(
        self, plan: AttemptPlan, record: AttemptRecord, first: int, reason: str, writer: EventWriter
    ) -> None:
        attempt = self._run_dir.attempt(plan.number)
        for folder in (attempt.events, attempt.logs, attempt.stacks, self._run_dir.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        self._lease.check()
        has_history = ever_committed(self._run_dir.checkpoints)  # also when it starts from imported weights
        file = AttemptFile(
            number=plan.number,
            layout=plan.layout,
            nodes=record.nodes,
            restore="newest" if plan.number > 1 or has_history else "fresh",
        )
        write_attempt_file(attempt.attempt_json, file)
        self._save(self._record.with_attempt(record))
        writer.emit(
            AttemptStarted(
                world_size=plan.layout.world_size,
                nodes=record.nodes,
                layout=to_json(plan.layout),
                reason=reason,
            )
        )

    def _runner(self, plan: AttemptPlan, writer: EventWriter) -> AttemptRunner:
        names = self._job.spec.cluster.environment.pass_through
        return AttemptRunner(
            self._run_dir,
            plan,
            self._backend,
            limits=self._limits,
            control=self._control,
            writer=writer,
            renew=self._lease.renew,
            environment={name: os.environ[name] for name in names if name in os.environ},
            when_orphaned=self._orphan_command(),
        )

    def _orphan_command(self) -> tuple[str, ...]:
        backend = self._backend
        return backend.orphan_command(self._run_dir) if isinstance(backend, AllocationBackend) else ()

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
        lost = dict.fromkeys((*self._record.lost_nodes, *result.unreachable))
        self._save(replace(self._record.with_attempt(ended), lost_nodes=tuple(lost)))

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
        if decision.action == "stop":
            step = self._record.committed_step
            where = f"newest checkpoint: step {step}" if step else "there is no checkpoint yet"
            message = f"{decision.reason}; {where}; go on with `llmtrain resume {self._run_dir.path}`"
        ended = replace(
            self._record,
            stage="ended",
            exit_status=int(decision.exit_status),
            message=message,
            stop_requested=self._control.is_requested,
        )
        self._control.forget()
        self._save(ended)
        writer.emit(RunEnded(exit_status=int(decision.exit_status), message=message))
        return decision.exit_status

    def _save(self, record: RunRecord) -> None:
        write_record(self._run_dir, record, self._lease)
        self._record = record
