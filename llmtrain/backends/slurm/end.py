"""`python -m llmtrain.backends.slurm.end`: what follows when a SLURM job has no supervisor any more.

The batch script calls it with the supervisor's exit code; an agent whose supervisor vanished calls it with
`--orphan`, and a lookout on another node runs it with `--watch`. A job is queued again at most once for each
of its starts, whoever asks: SLURM itself would also queue a cancelled or a finished job again, and a second
request would end the job that the first one started.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain.agent.sweep import leftovers
from llmtrain.backends.slurm.calls import SlurmCalls
from llmtrain.backends.slurm.states import JobRow
from llmtrain.config.slurm import slurm_config
from llmtrain.errors import ExitStatus, LlmtrainError
from llmtrain.run.atomic import create_once, json_text
from llmtrain.run.job_file import read_job_file
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import RENEW_SECONDS, read_holder
from llmtrain.run.record import RunRecord, read_record
from llmtrain.run.submission import read_submission
from llmtrain.transport.local import LocalTransport

FRESH_SECONDS = 3 * RENEW_SECONDS
"""A lease that was renewed so recently has a living holder."""
CLAIM_SECONDS = 30.0
"""Time that the one who claimed a requeue gets to do it; then the next one may."""
TRIES = 4
"""How often an agent looks whether the one who claimed the requeue has done it."""
IDLE_STARTS = 3
"""Starts of a job without a newer checkpoint or a higher step, after which it is not queued again."""

Sequel = Literal["requeue", "leave", "cancel_rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the decision depends on."""

    status: int
    """The supervisor's exit code."""
    stop_requested: bool
    """Whether a person asked for the stop."""
    state: str
    """SLURM's word for the job."""
    restarts: int
    requeue: bool
    """Whether the profile wants it."""
    requeue_limit: int
    waiting: bool
    """Whether further jobs of the run are in the queue."""
    idle_starts: int
    """Starts of the job in a row that brought the run no further."""


def decide(situation: Situation) -> tuple[Sequel, str]:
    """What to do and why. Pure."""
    can_go_on = situation.status == ExitStatus.RESUMABLE or situation.status > 128
    if not can_go_on:
        return "cancel_rest", f"the run has ended with {situation.status}"
    if situation.stop_requested:
        return "cancel_rest", "a person asked for the stop"
    if situation.waiting:
        return "leave", "the next job of the chain goes on"
    if not situation.requeue:
        return "leave", "backend.slurm.requeue is off"
    if situation.state != "RUNNING":
        return "leave", f"SLURM is ending the job itself ({situation.state.lower()})"
    if situation.restarts >= situation.requeue_limit:
        return (
            "leave",
            f"started again {situation.restarts} times, as often as backend.slurm.requeue_limit allows",
        )
    if situation.idle_starts >= IDLE_STARTS:
        return "leave", f"{situation.idle_starts} starts in a row brought the run no further"
    return "requeue", "the run can go on"


def main(argv: list[str], environment: Mapping[str, str] | None = None) -> int:
    """Decide and act; 0 unless that failed."""
    parser = argparse.ArgumentParser(prog="python -m llmtrain.backends.slurm.end")
    parser.add_argument("run_dir", type=Path)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--status", type=int)
    how.add_argument("--orphan", action="store_true")
    how.add_argument("--watch", action="store_true")
    options = parser.parse_args(argv)
    run = RunDir(options.run_dir.absolute())
    try:
        settle = Settlement(run, os.environ if environment is None else environment)
        if options.watch:
            return settle.watched()
        return settle.orphaned() if options.orphan else settle.ended(options.status)
    except (LlmtrainError, OSError) as error:
        say(error.text() if isinstance(error, LlmtrainError) else str(error))
        return 1


class Settlement:
    """What one process of a job knows and may do."""

    def __init__(
        self, run: RunDir, environment: Mapping[str, str], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._run, self._sleep = run, sleep
        self._config = slurm_config(read_job_file(run.job_json, edited_too=True).spec.cluster.backend.slurm)
        self._calls = SlurmCalls(LocalTransport(), self._config.timeout)
        self._job = environment["SLURM_JOB_ID"]
        self._array = environment.get("SLURM_ARRAY_JOB_ID")
        self._restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))

    def ended(self, status: int) -> int:
        """The supervisor left with an exit code."""
        record = read_record(self._run)
        sequel, why = decide(self._situation(status, record))
        say(f"job {self._job}: {sequel.replace('_', ' ')}: {why}")
        if sequel == "requeue" and self._claim(record):
            self._calls.requeue(self._job)
        elif sequel == "cancel_rest":
            for job in self._others():
                self._calls.cancel(job, pending_only=True)
        return 0

    def orphaned(self) -> int:
        """This agent's supervisor went away without a word; whoever claims it first queues the job again."""
        if self._is_supervised():
            say(f"job {self._job}: the run has a supervisor")
            return 0
        record = read_record(self._run)
        for _ in range(TRIES):
            row = self._row()
            if row is None or row.state != "RUNNING" or row.restarts != self._restarts:
                return 0
            sequel, why = decide(self._situation(128 + 9, record, row))
            say(f"job {self._job}: its supervisor is gone; {sequel}: {why}")
            if sequel != "requeue":
                return 0
            if self._claim(record):
                self._calls.requeue(self._job)
                return 0
            self._sleep(CLAIM_SECONDS)
        return 1

    def watched(self) -> int:
        """Wait until the supervisor leaves; when it vanishes instead, and no agent here still lets its ranks
        save, do what an agent would."""
        while (holder := read_holder(self._run)) is None or not holder.released:
            if holder is not None and holder.age > FRESH_SECONDS and not leftovers(self._run.path):
                return self.orphaned()
            self._sleep(1.0)
        return 0

    def _is_supervised(self) -> bool:
        """Whether somebody is in charge; waits until it is certain. A supervisor that was killed is started
        again by the batch script and takes the lease; one that left in order has released it."""
        first = holder = read_holder(self._run)
        while (
            holder is not None and first is not None and holder.token == first.token and not holder.released
        ):
            if holder.age > FRESH_SECONDS:
                return False
            age = holder.age
            self._sleep(1.0)
            holder = read_holder(self._run)
            if holder is not None and holder.age < age:
                return True
        return holder is not None

    def _situation(self, status: int, record: RunRecord, row: JobRow | None = None) -> Situation:
        row = row or self._row()
        # The STOP file is a wish that nobody could record: the supervisor was killed before it saw it.
        is_wanted = self._run.stop_file.exists() or (record.stop_requested and status == ExitStatus.RESUMABLE)
        return Situation(
            status=status,
            stop_requested=is_wanted,
            state=row.state if row is not None else "unknown",
            restarts=self._restarts,
            requeue=self._config.requeue,
            requeue_limit=self._config.requeue_limit,
            waiting=any(
                other.state == "PENDING" for job in self._others() for other in self._calls.queue([job])
            ),
            idle_starts=self._idle_starts(record),
        )

    def _row(self) -> JobRow | None:
        return next(iter(self._calls.queue([self._job])), None)

    def _others(self) -> list[str]:
        """Other jobs of this run: those of the chain, or the array that this one is a task of."""
        if self._array:
            return [self._array]
        submission = read_submission(self._run)
        jobs = submission.jobs if submission is not None else ()
        return [job for job in jobs if job != self._job]

    def _claim(self, record: RunRecord) -> bool:
        """Whether this process is the one to queue the job again."""
        text = json_text(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": time.time(),
                "reached_step": record.reached_step,
                "committed_step": record.committed_step,
            }
        )
        stem = f"{self._job}-{self._restarts}"
        if create_once(self._run.requeues / f"{stem}.json", text):
            return True
        old = list(self._run.requeues.glob(f"{stem}*.json"))
        try:
            newest = max(path.stat().st_mtime for path in old)
        except (OSError, ValueError):
            return False
        # The one who claimed it did not do it: its node may be lost, too.
        late = time.time() - newest > CLAIM_SECONDS
        return late and create_once(self._run.requeues / f"{stem}-{len(old)}.json", text)

    def _idle_starts(self, record: RunRecord) -> int:
        """Earlier starts of this job whose end saw the run where it is now, this one included."""
        count = 0
        for restart in range(self._restarts - 1, -1, -1):
            try:
                claim = json.loads((self._run.requeues / f"{self._job}-{restart}.json").read_text())
                seen = (claim["reached_step"], claim["committed_step"])
            except (OSError, ValueError, KeyError, TypeError):
                break
            if seen != (record.reached_step, record.committed_step):
                break
            count += 1
        return count


def say(text: str) -> None:
    """One line for the log."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} slurm.end: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
