"""What `launch` and `resume` share: start the supervisor, show the run, pass stops on, end like the run."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from llmtrain.cli import console
from llmtrain.cli.job import end_job, exit_code_of_job, see_job_off, wait_in_queue
from llmtrain.errors import ExitStatus

if TYPE_CHECKING:
    from llmtrain.backends.base import Backend, JobHandle
    from llmtrain.run.job_file import JobFile
    from llmtrain.run.layout import RunDir

QUEUE_SECONDS = 60.0
"""For a job to leave the queue."""


def start_and_attach(run: RunDir, job: JobFile, backend: Backend, *, detach: bool, as_json: bool) -> int:
    """Submit a run whose directory is written; returns the exit code of the command."""
    since = time.time()
    # From here on a stop reaches the run: a Ctrl-C while it is submitted must not leave it going unseen.
    stops = None if detach else _Stops(run)
    handle = backend.submit(run, job)
    if stops is None:
        if as_json:
            console.emit_json({"run": run.run_id, "path": str(run.path), "job": str(handle)})
        else:
            console.say(f"run {run.run_id} goes on by itself ({handle})")
            console.say(f"watch: llmtrain status {run.argument} --watch\nstop:  llmtrain stop {run.argument}")
        return ExitStatus.DONE
    code = _attach(run, backend, handle, since, stops)
    if as_json:
        console.emit_json({"run": run.run_id, "path": str(run.path), "exit_status": code})
    return code


def _attach(run: RunDir, backend: Backend, handle: JobHandle, since: float, stops: _Stops) -> int:
    from llmtrain.backends.base import AllocationBackend, JobState
    from llmtrain.backends.restarts import is_started_again
    from llmtrain.observe.terminal_views.progress import follow
    from llmtrain.observe.terminal_views.screen import make_console

    def is_alive() -> bool:
        return backend.poll(handle).state in (JobState.PENDING, JobState.RUNNING)

    console.say(f"run {run.run_id} in {run.path}")
    while True:
        begun = wait_in_queue(backend, handle, stops.are_wanted)
        if begun is None:
            end_job(run, backend, handle, QUEUE_SECONDS)
            console.say(f"taken out of the queue; go on with `llmtrain resume {run.argument}`")
            return ExitStatus.RESUMABLE
        code = follow(run, console=make_console(stderr=True), since=since, is_alive=is_alive)
        stopped = time.time()
        is_stop = code == ExitStatus.RESUMABLE and stops.are_wanted()
        if is_stop and isinstance(backend, AllocationBackend):
            see_job_off(run, backend, handle, QUEUE_SECONDS)
        if (
            code != ExitStatus.RESUMABLE
            or is_stop
            or not is_started_again(backend, handle, begun.incarnation)
        ):
            return exit_code_of_job(run, backend.poll(handle), code, since)
        console.say("the scheduler goes on with the run")
        since = stopped


class _Stops:
    """Ctrl-C and SIGTERM ask the run to save and leave; a second one ends it now. The view goes on."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._asked = run, 0
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def are_wanted(self) -> bool:
        """Whether a stop was asked for here."""
        return self._asked > 0

    def _on_signal(self, number: int, frame: object) -> None:
        from llmtrain.supervise.stop import ask_to_stop

        self._asked += 1
        now = self._asked > 1
        ask_to_stop(self._run, now=now)
        again = "; once more: stop now, without saving" if number == signal.SIGINT else ""
        gently = f"stopping: the ranks save at the end of the current step and leave{again}"
        console.say("killing the ranks" if now else gently)
