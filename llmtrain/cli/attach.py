"""What `launch` and `resume` share: start the supervisor, show the run, pass stops on, end like the run."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from llmtrain.cli import console
from llmtrain.errors import ExitStatus

if TYPE_CHECKING:
    from llmtrain.backends.base import Backend, JobHandle
    from llmtrain.run.job_file import JobFile
    from llmtrain.run.layout import RunDir


def start_and_attach(run: RunDir, job: JobFile, backend: Backend, *, detach: bool, as_json: bool) -> int:
    """Submit a run whose directory is written; returns the exit code of the command."""
    since = time.time()
    handle = backend.submit(run, job)
    if detach:
        if as_json:
            console.emit_json({"run": run.run_id, "path": str(run.path), "job": str(handle)})
        else:
            console.say(f"run {run.run_id} goes on by itself ({handle})")
            console.say(f"watch: llmtrain status {run.path} --watch\nstop:  llmtrain stop {run.path}")
        return ExitStatus.DONE
    code = _attach(run, backend, handle, since)
    if as_json:
        console.emit_json({"run": run.run_id, "path": str(run.path), "exit_status": code})
    return code


def _attach(run: RunDir, backend: Backend, handle: JobHandle, since: float) -> int:
    from llmtrain.backends.base import JobState
    from llmtrain.observe.progress import follow
    from llmtrain.observe.terminal import make_console

    def is_alive() -> bool:
        return backend.poll(handle).state in (JobState.PENDING, JobState.RUNNING)

    console.say(f"run {run.run_id} in {run.path}")
    _pass_on_stops(run)
    code = follow(run, console=make_console(stderr=True), since=since, is_alive=is_alive)
    left = backend.poll(handle).exit_code
    if left is not None and left < 0:
        name = signal.Signals(-left).name
        console.say(f"the supervisor was killed by {name}; go on with `llmtrain resume {run.path}`")
        return 128 - left
    return code


def _pass_on_stops(run: RunDir) -> None:
    """Ctrl-C and SIGTERM ask the run to save and leave; a second one ends it now. The view goes on."""
    asked = 0

    def on_signal(number: int, frame: object) -> None:
        from llmtrain.supervise.stop import ask_to_stop

        nonlocal asked
        asked += 1
        ask_to_stop(run, now=asked > 1)
        again = "once more: stop now, without saving" if number == signal.SIGINT else ""
        console.say(
            "killing the ranks"
            if asked > 1
            else f"stopping: the ranks save at the end of the current step and leave; {again}".rstrip("; ")
        )

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
