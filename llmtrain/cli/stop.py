"""`llmtrain stop`: ask a run to save and leave, and wait until it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.forward import forwarded
from llmtrain.cli.options import RUNS, Json, RunName, Runs
from llmtrain.errors import ExitStatus, RunError

if TYPE_CHECKING:
    from llmtrain.run.layout import RunDir
    from llmtrain.run.lease import LeaseHolder

TEAR_DOWN_SECONDS = 60.0
"""Longest wait beyond the time that the ranks get to save."""
LOOK_SECONDS = 10.0
"""After which the scheduler is asked whether the supervisor can hear at all."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("stop")(_stop)


def _stop(
    run: RunName,
    now: Annotated[bool, typer.Option("--now", help="Kill the ranks at once, without saving.")] = False,
    grace: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.0, help="How long the ranks get to save; default: 120."),
    ] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> int:
    """Save and stop a run.

    Its ranks save at the end of the current step and leave. `resume` goes on with it.

    Exit code 0 once the run is not running any more, whoever ended it.
    """
    from llmtrain.run.find import find_run
    from llmtrain.run.lease import read_holder
    from llmtrain.run.record import read_record

    found = find_run(run, runs)
    if (code := forwarded(found, run)) is not None:
        return code
    holder = read_holder(found)
    if holder is not None and holder.is_alive:
        _end_supervised(found, holder, now=now, grace=grace)
        word = "stopped"
    else:
        word = _end_job(found, now=now) or _end_leftovers(found)
    record = read_record(found)
    console.say(f"run {found.run_id}: {word}{f' ({record.message})' if record.message else ''}")
    if as_json:
        told = {"run": found.run_id, "path": str(found.path.absolute()), "state": word}
        console.emit_json({**told, "exit_status": record.exit_status})
    return ExitStatus.DONE


def _end_supervised(run: RunDir, holder: LeaseHolder, *, now: bool, grace: float | None) -> None:
    """Ask the supervisor to end the run, and wait until it has left."""
    from llmtrain.supervise.detection.limits import SAVE_SECONDS
    from llmtrain.supervise.stop import ask_to_stop

    ask_to_stop(run, now=now, grace=grace)
    what = "leave now" if now else "save and leave"
    console.say(f"asked the supervisor ({holder.describe()}) to {what}")
    _wait(run, holder, 0.0 if now else SAVE_SECONDS if grace is None else grace)
    _end_job(run, now=now)


def _wait(run: RunDir, holder: LeaseHolder, grace: float) -> None:
    """Wait until the supervisor has left. Raises RunError when it takes longer than it may."""
    import time

    from llmtrain.cli.job import job_of, refuse_suspended
    from llmtrain.run.lease import read_holder

    began = time.monotonic()
    deadline, is_looked_at = began + grace + TEAR_DOWN_SECONDS, False
    while (current := read_holder(run)) is not None and current.is_alive and current.token == holder.token:
        if time.monotonic() > deadline:
            hint = f"`llmtrain stop {run.argument} --now` kills it; the supervisor is {holder.describe()}"
            raise RunError("the run has not stopped in time", where=str(run.path), hint=hint)
        if time.monotonic() - began > LOOK_SECONDS and not is_looked_at:
            is_looked_at = True
            if (job := job_of(run)) is not None:
                refuse_suspended(run, *job)
        time.sleep(0.1)


def _end_job(run: RunDir, *, now: bool) -> str:
    """End a scheduler's job whose supervisor has not begun, or has just left; empty when there is none."""
    from llmtrain.backends.base import JobState
    from llmtrain.backends.registry import load_backend
    from llmtrain.cli.job import is_leaving, is_there, job_of, see_job_off
    from llmtrain.run.job_file import read_job_file
    from llmtrain.supervise.stop import ask_to_stop

    found = job_of(run)
    if found is None or not (is_there(found[1]) or is_leaving(found[1])):
        return ""
    handle, status = found
    # It may start at any moment, and its script may not listen yet: then the supervisor finds this file.
    ask_to_stop(run, now=now)
    console.say(f"waiting for job {handle} to leave")
    backend = load_backend(read_job_file(run.job_json, edited_too=True).spec.cluster)
    see_job_off(run, backend, handle, TEAR_DOWN_SECONDS)
    return "taken out of the queue" if status.state == JobState.PENDING else "stopped"


def _end_leftovers(run: RunDir) -> str:
    """End ranks of a run without supervisor on this machine; what became of them, in a word."""
    from llmtrain.agent.sweep import sweep

    swept = sweep(run.path.absolute())
    if swept.remaining:
        raise RunError(f"processes {swept.remaining} cannot be killed", where=str(run.path))
    return f"killed {len(swept.killed)} leftover processes" if swept.killed else "was not running"
