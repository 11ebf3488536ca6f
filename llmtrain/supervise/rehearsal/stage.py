"""One rehearsed run on its stage: started, watched, disturbed, and ended whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from llmtrain.agent.sweep import leftovers, sweep
from llmtrain.backends.base import Backend, JobHandle, JobState, JobStatus
from llmtrain.backends.local import start_supervisor
from llmtrain.backends.rehearsed import lose_host, lose_stand_in
from llmtrain.backends.restarts import is_started_again
from llmtrain.errors import LlmtrainError
from llmtrain.events.event import Event
from llmtrain.events.reader import merge, read_events
from llmtrain.events.schema import CheckpointCommitted, StepFinished
from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.job_file import JobFile, read_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.supervise.stop import ask_to_stop

POLL_SECONDS = 0.1
END_SECONDS = 60.0
"""For a run that is told to end, and for a job to leave after its run."""
RECORD_SECONDS = 10.0
"""For the record of a run whose job has ended to be seen here."""
ALIVE = (JobState.PENDING, JobState.RUNNING)
REHEARSED = "llmtrain.supervise.rehearsal"
"""The supervisor of a run whose nodes are lost on purpose."""


class RehearsalError(LlmtrainError):
    """Something that the scenario waits for did not come."""


class Stage:
    """A run under rehearsal."""

    def __init__(
        self,
        run: RunDir,
        job: JobFile,
        backend: Backend,
        *,
        limit: float,
        loses_nodes: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`limit`: seconds for the whole scenario, without what its job waits in a queue."""
        self.run, self._job, self._backend, self._say = run, job, backend, say
        self._loses_nodes = loses_nodes
        self._looked = time.monotonic()
        self._deadline = self._looked + limit
        self._over: float | None = None
        """When the job was seen to have ended, while the run's record said otherwise."""
        self._handle: JobHandle | None = None
        self._incarnation, self._queued = "", ""

    # ---- starting and ending
    def start(self) -> None:
        """Start a supervisor. Raises LlmtrainError."""
        if self._loses_nodes:
            kind = self._job.spec.cluster.backend.kind
            self._handle = start_supervisor(self.run, backend=kind, module=REHEARSED)
        else:
            self._handle = self._backend.submit(self.run, self._job)

    def go_on(self) -> str:
        """After the run has left early: wait until it goes on, by a scheduler's will or by ours; how, in
        words. Raises RehearsalError."""
        assert self._handle is not None
        by_itself = is_started_again(self._backend, self._handle, self._incarnation)
        if not by_itself:
            self.start()
        while self.has_ended():
            self._pause("the run did not go on in time", may_be_over=True)
        return "was queued again and went on" if by_itself else "was resumed"

    def end(self) -> None:
        """Leave nothing running, and no job in a queue."""
        if self._handle is None:
            return
        with suppress(LlmtrainError):
            if not self.has_ended():
                ask_to_stop(self.run, now=True)
                self._backend.cancel(self._handle)
        until = time.monotonic() + END_SECONDS
        while self._status().state in ALIVE and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if leftovers(self.run.path):
            sweep(self.run.path)

    # ---- watching
    def events(self) -> list[Event]:
        """All events so far."""
        files = sorted(self.run.attempts.glob("*/events/*.jsonl"))
        return list(merge([list(read_events(path)) for path in files]))

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Poll until something is true. Raises RehearsalError when the scenario's time is over, or when the
        run has ended without it."""
        while not done():
            if self.has_ended() and not done():
                raise RehearsalError(f"{what}: the run ended first ({read_record(self.run).message})")
            self._pause(f"{what}: did not happen in time")

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        """Until a step of an attempt is done."""

        def done() -> bool:
            return any(
                isinstance(event.payload, StepFinished)
                and (event.attempt, event.payload.step) >= (attempt, step)
                for event in self.events()
            )

        self.wait(f"step {step} of attempt {attempt}", done)

    def wait_for_checkpoint(self, step: int) -> None:
        """Until one of this step or a later one is committed."""

        def done() -> bool:
            return any(
                isinstance(event.payload, CheckpointCommitted) and event.payload.step >= step
                for event in self.events()
            )

        self.wait(f"checkpoint of step {step}", done)

    def wait_for_end(self) -> int:
        """The exit code of the run."""
        while not self.has_ended():
            self._pause("the run did not end in time")
        return read_record(self.run).exit_status or 0

    def has_ended(self) -> bool:
        """Whether the run has an exit code."""
        return read_record(self.run).stage == "ended"

    def _pause(self, too_late: str, *, may_be_over: bool = False) -> None:
        """Until the next look. Raises RehearsalError when the scenario's time is over, or when the job is,
        and nothing says how the run went."""
        status, now = self._status(), time.monotonic()
        if status.state == JobState.PENDING:
            self._deadline += now - self._looked
            self._say_queued(status)
        self._looked = now
        if status.state in ALIVE or may_be_over:
            self._over = None
        elif self._over is None:
            self._over = now
        elif now - self._over > RECORD_SECONDS:
            raise RehearsalError(f"its job ended ({status.raw or status.state}) and the run did not")
        if now > self._deadline:
            raise RehearsalError(too_late)
        time.sleep(POLL_SECONDS)

    def _status(self) -> JobStatus:
        if self._handle is None:
            return JobStatus(state=JobState.UNKNOWN)
        return self._backend.poll(self._handle)

    def _say_queued(self, status: JobStatus) -> None:
        words = f"job {self._handle} waits{f' ({status.reason})' if status.reason else ''}"
        if words != self._queued:
            self._say(words)
            self._queued = words

    # ---- disturbing
    def preempt(self) -> float:
        """Ask the supervisor to leave, as a scheduler does; when."""
        assert self._handle is not None
        self._incarnation, now = self._status().incarnation, time.time()
        self._backend.cancel(self._handle)
        return now

    def damage_newest_checkpoint(self) -> int:
        """Flip bits in a shard of the newest checkpoint; its step."""
        newest = max(list_checkpoints(self.run.checkpoints), key=lambda found: found.step)
        shard = max(newest.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 0xFF
        shard.write_bytes(data)
        return newest.step

    def lose_node(self) -> str:
        """Lose the second node of the newest attempt; its name. Raises TransportError."""
        number, place = self.run.attempt_numbers()[-1], 1
        name = read_attempt_file(self.run.attempt(number).attempt_json).nodes[place]
        if self._job.spec.cluster.backend.kind == "local":
            lose_stand_in(self.run, name, place)
        else:
            lose_host(self.run, self._backend, name)
        return name
