"""Submitting the jobs of a run: never twice, never for ever, and never with one of them forgotten."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from llmtrain.backends.base import LEAVING_SECONDS, JobState
from llmtrain.backends.slurm.calls import SlurmCalls
from llmtrain.backends.slurm.reach import told_when_slow
from llmtrain.backends.slurm.refusals import SlurmError, SlurmUnreachableError
from llmtrain.backends.slurm.states import ALIVE, HOPELESS_REASONS, LEAVING, JobRow, one_of
from llmtrain.config.slurm import SlurmConfig
from llmtrain.errors import ConfigError, Problem, RunError, UsageError
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder
from llmtrain.run.submission import read_submission

KEPT_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
SLURM_VARIABLES = ("SLURM_CONF", "SBATCH_", "SQUEUE_")
"""What a job gets even with `export: none`."""
REASON_SECONDS = 3.0
"""Longest wait after a submission for the scheduler's opinion."""


def refuse_second(calls: SlurmCalls, run: RunDir) -> None:
    """Raise UsageError when a job of this run is in the queue; one that is just leaving is waited for."""
    submission = read_submission(run)
    if submission is None:
        return
    row = calls.settled(submission.jobs, LEAVING_SECONDS, lambda row: is_leaving(run, row))
    if row is not None and row.ours in ALIVE:
        reason = f": {row.reason}" if row.reason else ""
        raise UsageError(
            f"job {row.id} of this run is still there ({row.state.lower()}{reason})",
            where=str(run.path),
            hint=f"watch it with `llmtrain status {run.argument} --watch`, "
            f"or end it with `llmtrain stop {run.argument}`",
        )


def is_leaving(run: RunDir, row: JobRow) -> bool:
    """Whether a job is on its way out: cleaned away by SLURM, or its supervisor has left in order and its
    script is about to end."""
    if row.state == LEAVING:
        return True
    if row.ours != JobState.RUNNING:
        return False
    holder = read_holder(run)
    this_start = f"slurm:{row.number or row.id}:{row.restarts}"
    return holder is not None and holder.released and holder.allocation == this_start


def submit_jobs(calls: SlurmCalls, script: str, name: str, count: int, without: Sequence[str]) -> list[str]:
    """Submit a script so many times; ids of the jobs. sbatch does not see the variables in `without`.

    Raises ConfigError when the profile asks for what the cluster will never give, else SlurmError; then no
    job is left in the queue.
    """
    jobs: list[str] = []
    try:
        for _ in range(count):
            jobs.append(_submit_once(calls, script, name, jobs, without))
        _refuse_hopeless(calls, jobs)
    except (RunError, ConfigError):
        _withdraw(calls, jobs)
        raise
    return jobs


def hidden_variables(config: SlurmConfig, environment: Mapping[str, str], passed: Sequence[str]) -> list[str]:
    """Variables of this shell that a job with `export: none` does not get; `passed` are those that the
    profile names."""
    if config.export == "all":
        return []
    kept = {*KEPT_VARIABLES, *passed}
    return [name for name in environment if name not in kept and not name.startswith(SLURM_VARIABLES)]


def _submit_once(
    calls: SlurmCalls, script: str, name: str, known: Sequence[str], without: Sequence[str]
) -> str:
    try:
        with told_when_slow(f"submitting the job (sbatch), at most {calls.timeout:g} s"):
            return calls.submit(script, without)
    except SlurmUnreachableError as error:
        # The answer may have been lost, and not the request: look before saying that there is no job.
        try:
            with told_when_slow(f"{error}; looking for the job all the same (squeue)"):
                rows = calls.named(name)
        except SlurmError:
            hint = f"it may have been submitted all the same: `squeue --name={name}`, later"
            raise SlurmUnreachableError(str(error), hint=hint) from error
        fresh = [row.id for row in rows if row.ours in ALIVE and row.id not in known]
        if not fresh:
            raise
        return fresh[0].partition("_")[0]


def _refuse_hopeless(calls: SlurmCalls, jobs: Sequence[str]) -> None:
    """Ask the scheduler, for a moment, whether it will ever start the job."""
    deadline = time.monotonic() + REASON_SECONDS
    while time.monotonic() < deadline:
        row = one_of(calls.queue(jobs[:1]))
        if row is None or row.ours != JobState.PENDING:
            return
        hint = next((hint for word, hint in HOPELESS_REASONS.items() if word in row.reason), None)
        if hint is not None:
            message = f"SLURM would never start this job: {row.reason}"
            raise ConfigError([Problem("backend.slurm", message, hint)])
        if row.reason:
            return
        time.sleep(0.2)


def _withdraw(calls: SlurmCalls, jobs: Sequence[str]) -> None:
    for job in jobs:
        try:
            calls.cancel(job)
        except SlurmError as error:
            raise SlurmError(f"job {job} is left in the queue: {error}", hint=f"`scancel {job}`") from error
