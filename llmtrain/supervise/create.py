"""The beginning of a run: its id, and its directory written from the rendered files."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from llmtrain import __version__
from llmtrain.config.job import JobSpec
from llmtrain.errors import RunError, UsageError
from llmtrain.plan.document import plan_document
from llmtrain.plan.plan import Plan
from llmtrain.render.scripts import RenderedJob, render
from llmtrain.resources import user_path
from llmtrain.run.atomic import write_atomic
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.record import RunRecord, write_record

LAST = "job.json"
"""Written last: a folder without it is no run."""


def new_run_id(recipe: str, *, now: float, random: bytes) -> str:
    """`<recipe>-<date>-<time>-<4 hex digits>`, in UTC."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{recipe}-{stamp}-{random[:2].hex()}"


def run_dir_for(recipe: str, storage: str, given: Path | None) -> RunDir:
    """The absolute run directory of a new run: the given one, or a fresh name below the storage folder.

    Raises UsageError for a folder that is in use.
    """
    if given is None:
        name = new_run_id(recipe, now=time.time(), random=os.urandom(2))
        return RunDir(user_path(storage).absolute() / name)
    path = Path(os.path.normpath(user_path(given).absolute()))
    run = RunDir(path)
    if run.job_json.exists():
        hint = f"go on with it by `llmtrain resume {run.argument}`, or choose another --run-dir"
        raise UsageError("there is a run in this folder already", where=str(path), hint=hint)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError("is not an empty folder", where=str(path), hint="choose another --run-dir")
    return run


def plan_as_files(
    run: RunDir, spec: JobSpec, plan: Plan, *, place: RunDir | None = None
) -> tuple[JobFile, RenderedJob]:
    """Job file of a new run in the best layout of its plan, and all files that its folder begins with.

    `place` is the folder as its nodes see it, where that is another path than `run`.
    """
    job = JobFile(run_id=run.run_id, version=__version__, spec=spec, layout=plan.plans[0].layout)
    return job, render(job, plan_document(plan), place or run, python=sys.executable)


def create_run(run: RunDir, job: RenderedJob) -> None:
    """Write the run directory. Raises UsageError when the file system refuses the place.

    Of two launches into one folder, one gets the job file in and the other is told.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        for name in sorted(job.files, key=lambda each: (each == LAST, each)):
            write_atomic(run.path / name, job.files[name], mode=0o755 if name.endswith(".sh") else 0o644)
        write_record(run, RunRecord(run_id=run.run_id, created=time.time()))
    except OSError as error:
        message = f"cannot be written: {(error.strerror or str(error)).lower()}"
        raise UsageError(
            message, where=str(error.filename or run.path), hint="choose another folder"
        ) from error


def discard_run(run: RunDir) -> None:
    """Remove a run that was written and never started; one that has started stays."""
    if not run.attempts.exists() and not run.lease.exists() and not run.submission_json.exists():
        import shutil  # A dry run, which is to start quickly, does without.

        shutil.rmtree(run.path, ignore_errors=True)


def rewrite_scripts(run: RunDir, scripts: RenderedJob) -> None:
    """Bring the scripts of a run up to date before it is resumed. Raises RunError."""
    try:
        for name, text in scripts.files.items():
            write_atomic(run.path / name, text, mode=0o755)
    except OSError as error:
        raise RunError(f"cannot be written: {error.strerror}", where=str(run.scripts)) from error
