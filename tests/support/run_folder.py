"""Run folders on disk for tests of views, written with the real writers' formats."""

from __future__ import annotations

import json
import os
from pathlib import Path

from llmtrain.config.codec import to_json
from llmtrain.events.event import Event, encode_line
from llmtrain.run.atomic import write_json
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import acquire

LAYOUT = {
    "dp": 2,
    "tp": 2,
    "pp": 2,
    "vpp": 1,
    "cp": 1,
    "ep": 1,
    "zero": 1,
    "sequence_parallel": False,
    "micro_batch": 4,
    "schedule": "1f1b",
    "recompute": "none",
}


def make_run(folder: Path, *, steps: int = 20) -> RunDir:
    """A run with a job file and nothing else."""
    folder.mkdir(parents=True)
    run = RunDir(folder)
    recipe = {
        "name": "tiny",
        "train": {"steps": steps, "seed": 0},
        "batch": {"global": 8},
        "model": {"sequence": 256},
    }
    spec = {"recipe": recipe, "cluster": {"name": "local", "backend": {"kind": "local"}}}
    run.job_json.write_text(json.dumps({"schema": 1, "run_id": run.run_id, "spec": spec, "layout": LAYOUT}))
    return run


def write_job_file(path: Path, job: JobFile) -> None:
    """`job.json` as a launch writes it."""
    write_json(path, to_json(job))


def write_attempt(run: RunDir, number: int, files: dict[str, list[Event]]) -> None:
    """Append the events of an attempt's files."""
    folder = run.attempt(number).events
    folder.mkdir(parents=True, exist_ok=True)
    for name, events in files.items():
        with (folder / name).open("ab") as file:
            file.write(b"".join(encode_line(event) for event in events))


def supervise(run: RunDir) -> None:
    """Make this process the run's supervisor."""
    acquire(run)


def abandon(run: RunDir) -> None:
    """Leave a lease whose supervisor is dead."""
    lease = acquire(run)
    raw = json.loads(lease.path.read_text())
    raw["process"]["pid"], raw["process"]["start"] = os.getpid(), 1
    lease.path.write_text(json.dumps(raw))
