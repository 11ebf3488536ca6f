"""One rehearsed run on its stage: started, watched, disturbed, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from llmtrain.agent.sweep import leftovers, sweep
from llmtrain.backends.base import Backend, JobHandle
from llmtrain.backends.local import start_supervisor
from llmtrain.errors import LlmtrainError
from llmtrain.events.event import Event
from llmtrain.events.reader import merge, read_events
from llmtrain.events.schema import CheckpointCommitted, RankStarted, StepFinished
from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.job_file import JobFile, read_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.supervise.stop import ask_to_stop

POLL_SECONDS = 0.1


class RehearsalError(LlmtrainError):
    """Something that the scenario waits for did not come."""


class Stage:
    """A run under rehearsal. `backend` None: several nodes of this machine that can be lost."""

    def __init__(self, run: RunDir, job: JobFile, backend: Backend | None, limit: float) -> None:
        self.run, self._job, self._backend = run, job, backend
        self._deadline = time.monotonic() + limit
        self._handle: JobHandle | None = None

    def start(self) -> None:
        """Start a supervisor."""
        if self._backend is not None:
            self._handle = self._backend.submit(self.run, self._job)
        else:
            module = "llmtrain.supervise.rehearsal"
            self._handle = start_supervisor(self.run, backend="local", module=module)

    def resume(self) -> None:
        """Start one more supervisor, of a run that has ended. Raises RehearsalError."""
        self.start()
        while self.has_ended():
            if time.monotonic() > self._deadline:
                raise RehearsalError("the run was not resumed in time")
            time.sleep(POLL_SECONDS)

    def events(self) -> list[Event]:
        """All events so far."""
        files = sorted(self.run.attempts.glob("*/events/*.jsonl"))
        return list(merge([list(read_events(path)) for path in files]))

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Poll until something is true. Raises RehearsalError when the scenario's time is over, or when the
        run has ended without it."""
        while not done():
            if time.monotonic() > self._deadline:
                raise RehearsalError(f"{what}: did not happen in time")
            if self.has_ended() and not done():
                raise RehearsalError(f"{what}: the run ended first ({read_record(self.run).message})")
            time.sleep(POLL_SECONDS)

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
            if time.monotonic() > self._deadline:
                raise RehearsalError("the run did not end in time")
            time.sleep(POLL_SECONDS)
        return read_record(self.run).exit_status or 0

    def has_ended(self) -> bool:
        """Whether the run has an exit code."""
        return read_record(self.run).stage == "ended"

    def preempt(self) -> float:
        """Ask the supervisor to leave, as a scheduler does; when."""
        now = time.time()
        if self._backend is not None and self._handle is not None:
            self._backend.cancel(self._handle)
        return now

    def kill_rank(self, rank: int) -> float:
        """Kill a rank of this machine; when."""
        pids = [
            event.payload.pid
            for event in self.events()
            if isinstance(event.payload, RankStarted) and event.rank == rank
        ]
        now = time.time()
        with suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGKILL)
        return now

    def damage_newest_checkpoint(self) -> int:
        """Flip bits in a shard of the newest checkpoint; its step."""
        newest = max(list_checkpoints(self.run.checkpoints), key=lambda found: found.step)
        shard = max(newest.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 0xFF
        shard.write_bytes(data)
        return newest.step

    def place_of(self, node: str) -> int | None:
        """Place of a node in the newest attempt; None when it has none."""
        number = self.run.attempt_numbers()[-1]
        nodes = read_attempt_file(self.run.attempt(number).attempt_json).nodes
        return nodes.index(node) if node in nodes else None

    def end(self) -> None:
        """Leave nothing running on this machine."""
        with suppress(LlmtrainError):
            if not self.has_ended():
                ask_to_stop(self.run, now=True)
        until = time.monotonic() + 30.0
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if leftovers(self.run.path):
            sweep(self.run.path)
