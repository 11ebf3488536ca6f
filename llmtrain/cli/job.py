"""A scheduler's job as people see it: how long it waits, how it ended, and what `status` says about it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmtrain.cli import console
from llmtrain.errors import ExitStatus, RunError

if TYPE_CHECKING:
    from llmtrain.backends.base import Backend, JobHandle, JobStatus
    from llmtrain.run.layout import RunDir

POLL_SECONDS = 0.5
SHOWN_LINES = 10
RECORD_BYTES = 1 << 16
"""Room that a record and its temporary copy need."""


def wait_in_queue(backend: Backend, handle: JobHandle, is_unwanted: Callable[[], bool]) -> JobStatus | None:
    """Wait until a job has left the queue, and say why it waits; None when it is not wanted any more."""
    from llmtrain.backends.base import JobState

    said = ""
    while (status := backend.poll(handle)).state == JobState.PENDING:
        if is_unwanted():
            return None
        words = waiting_text(handle, status)
        if words != said:
            console.say(words)
            said = words
        time.sleep(POLL_SECONDS)
    return status


def is_there(status: JobStatus) -> bool:
    """Whether a job waits or runs. One that is leaving does neither, though a busy controller may leave it
    there for minutes."""
    from llmtrain.backends.base import JobState

    return status.state in (JobState.PENDING, JobState.RUNNING) and not is_leaving(status)


def is_leaving(status: JobStatus) -> bool:
    """Whether a job has ended and its nodes are being cleaned; where it goes then is not known yet."""
    from llmtrain.backends.slurm.states import LEAVING

    return status.raw == LEAVING


def end_job(run: RunDir, backend: Backend, handle: JobHandle, seconds: float) -> None:
    """Take a job out of the queue, or tell it to leave, and wait until it has; the STOP file of its run is
    written already, and stays, so that a job which starts all the same leaves at once. Raises RunError when
    that takes longer than `seconds`."""
    from llmtrain.backends.base import LEAVING_SECONDS, JobState

    backend.cancel(handle)
    deadline, settled = time.monotonic() + seconds, time.monotonic() + LEAVING_SECONDS
    # One that is leaving may be on its way into the queue again.
    while is_there(status := backend.poll(handle)) or (is_leaving(status) and time.monotonic() < settled):
        refuse_suspended(run, handle, status)
        if status.state == JobState.PENDING:
            backend.cancel(handle)  # It began to run, and was queued again, while it was told.
        if time.monotonic() > deadline:
            hint = f"`scancel {handle.id.replace(',', ' ')}` kills it"
            raise RunError(f"job {handle} has not ended in time", where=str(run.path), hint=hint)
        time.sleep(POLL_SECONDS)


def see_job_off(run: RunDir, backend: Backend, handle: JobHandle, seconds: float) -> None:
    """After a stop, wait until the supervisor's job has left, and take it out of the queue if somebody has
    queued it again meanwhile. Raises RunError when that takes longer than `seconds`."""
    from llmtrain.backends.slurm.refusals import SlurmUnreachableError

    try:
        end_job(run, backend, handle, seconds)
    except SlurmUnreachableError as error:
        console.say(f"{error}; should job {handle} start again, it leaves at once")


def refuse_suspended(run: RunDir, handle: JobHandle, status: JobStatus) -> None:
    """Raise RunError for a job that cannot hear of a stop."""
    from llmtrain.backends.slurm.states import SUSPENDED

    if status.raw == SUSPENDED:
        job = handle.id.replace(",", " ")
        hint = (
            f"it leaves when an administrator lets it go on (`scontrol resume {job}`); or, without saving, "
        )
        raise RunError(f"job {handle} is suspended", where=str(run.path), hint=f"{hint}`scancel {job}`")


def waiting_text(handle: JobHandle, status: JobStatus) -> str:
    """`job slurm://7 waits (Resources), expected to start at 14:05`."""
    reason = f" ({status.reason})" if status.reason else ""
    when = ""
    if status.expected_start is not None:
        shape = "%H:%M" if abs(status.expected_start - time.time()) < 43200 else "%Y-%m-%d %H:%M"
        when = f", expected to start at {time.strftime(shape, time.localtime(status.expected_start))}"
    return f"job {handle} waits{reason}{when}"


def exit_code_of_job(run: RunDir, status: JobStatus, code: int, since: float) -> int:
    """The exit code of the command, with what the scheduler did said; `code` is what the run itself says."""
    from llmtrain.backends.base import JobState

    recorded = _recorded_since(run, since)
    ended_by_scheduler = (
        JobState.PREEMPTED,
        JobState.TIMED_OUT,
        JobState.NODE_FAILED,
        JobState.CANCELLED,
    )
    go_on = f"go on with `llmtrain resume {run.argument}`"
    if recorded:
        return code
    if status.state in ended_by_scheduler:
        console.say(f"the job ended as {status.raw} before the run could say anything; {go_on}")
        return ExitStatus.RESUMABLE
    if status.exit_code is not None and status.exit_code < 0:
        console.say(f"the supervisor was killed by {signal.Signals(-status.exit_code).name}; {go_on}")
        return 128 - status.exit_code
    if status.exit_code and run.submission_json.exists():
        _say_output(run)
        console.say(f"the job ended as {status.raw} with exit code {status.exit_code}; {go_on}")
        known = [each.value for each in ExitStatus]
        return status.exit_code if status.exit_code in known else ExitStatus.FAILED
    if status.exit_code:
        why = "no space is left on the device" if _is_full(run) else f"see {run.supervisor_log}"
        console.say(f"the supervisor left with exit code {status.exit_code} and could not record why: {why}")
        console.say(f"when that is mended, {go_on}")
    return code


def _is_full(run: RunDir) -> bool:
    """Whether the file system of a run has no room for a record."""
    import shutil

    return shutil.disk_usage(run.path).free < RECORD_BYTES


def _recorded_since(run: RunDir, since: float) -> bool:
    """Whether the run's own record tells of an ending after a moment."""
    import json

    try:
        record = json.loads(run.record_json.read_text(encoding="utf-8"))
        return record["stage"] == "ended" and run.record_json.stat().st_mtime >= since - 1.0
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _say_output(run: RunDir) -> None:
    """The end of what the batch script said."""
    outputs = sorted(run.path.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime)
    for path in outputs[-1:]:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        console.say(f"{path}:")
        for line in lines:
            console.say(f"  {line}")


def job_of(run: RunDir) -> tuple[JobHandle, JobStatus] | None:
    """The scheduler's job of a run and its state; None when it has none. Raises LlmtrainError."""
    from llmtrain.run.submission import read_submission

    submission = read_submission(run)
    if submission is None:
        return None
    from llmtrain.backends.base import JobHandle
    from llmtrain.backends.registry import load_backend
    from llmtrain.run.job_file import read_job_file

    handle = JobHandle(backend=submission.backend, id=",".join(submission.jobs))
    return handle, load_backend(read_job_file(run.job_json, edited_too=True).spec.cluster).poll(handle)


def job_document(handle: JobHandle, status: JobStatus) -> dict[str, Any]:
    """What `status --json` says about the job."""
    return {
        "handle": str(handle),
        "state": str(status.state),
        "raw": status.raw,
        "reason": status.reason,
        "exit_code": status.exit_code,
        "expected_start": status.expected_start,
    }


def job_text(handle: JobHandle, status: JobStatus) -> str:
    """One line about a job."""
    from llmtrain.backends.base import JobState

    if status.state == JobState.PENDING:
        return waiting_text(handle, status)
    reason = f" ({status.reason})" if status.reason else ""
    return f"job {handle}: {status.state}{reason}"
