"""Runs of the stand-in: a real run directory, supervisor, agents and processes, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llmtrain import __version__
from llmtrain.agent.sweep import leftovers
from llmtrain.config.job import resolve
from llmtrain.events.event import Event
from llmtrain.events.reader import merge, read_events
from llmtrain.plan.document import plan_document
from llmtrain.plan.make import make_plan
from llmtrain.render.scripts import render
from llmtrain.run.data_file import CorpusPlace, DataFile, write_data_file
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder
from llmtrain.supervise.create import create_run
from tests.support import stand_in


def make_run(path: Path, *, overrides: tuple[str, ...] = (), **behaviour: object) -> RunDir:
    """A run of two ranks whose node script starts the stand-in."""
    wanted = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1", "batch.micro=1", *overrides)
    spec = resolve("tiny", "local", wanted)
    plan = make_plan(spec)
    run = RunDir(path)
    job = JobFile(run_id=run.run_id, version=__version__, spec=spec, layout=plan.plans[0].layout)
    create_run(run, render(job, plan_document(plan), run, python=sys.executable))
    stand_in.install(run, **behaviour)
    return run


def prepared_corpus(folder: Path) -> Path:
    """A tiny prepared corpus that all stand-in runs of a test session share."""
    from llmtrain.corpus.preparation.prepare import prepare_folder

    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 2000)
    prepare_folder([str(text)], folder / "corpus", validation_fraction=0.0)
    return folder / "corpus"


def use_corpus(run: RunDir, folder: Path) -> None:
    from llmtrain.corpus.prepared import open_prepared

    place = CorpusPlace(folder=str(folder), digest=open_prepared(folder).digest)
    write_data_file(run.data_json, DataFile(corpora=(place,)))


def supervise(run: RunDir) -> subprocess.Popen[bytes]:
    """Start a supervisor as `launch` does."""
    with run.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "llmtrain.supervise", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def events(run: RunDir, kind: str | None = None) -> list[Event]:
    """All events of a run so far, in order of time."""
    files = sorted(run.attempts.glob("*/events/*.jsonl"))
    found = merge([list(read_events(path)) for path in files])
    return [event for event in found if kind is None or event.kind == kind]


def wait_for(condition: Callable[[], object], seconds: float = 60.0, what: str = "") -> object:
    """Poll until something is true; fails with its name."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what or condition}"
        time.sleep(0.02)
    return value


def step_reached(run: RunDir, step: int, attempt: int | None = None) -> bool:
    return any(
        event.payload.step >= step and attempt in (None, event.attempt)
        for event in events(run, "step_finished")
    )


def agent_pid(run: RunDir) -> int:
    """Pid of the newest attempt's agent."""
    import psutil

    number = run.attempt_numbers()[-1]
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
        except psutil.Error:
            continue
        if "llmtrain.agent" in argv and str(run.path) in argv and str(number) in argv:
            return process.pid
    raise AssertionError("no agent runs")


def rank_pid(run: RunDir, rank: int) -> int:
    """Pid of a rank of the newest attempt."""
    number = run.attempt_numbers()[-1]
    [*_, started] = [
        event for event in events(run, "rank_started") if event.rank == rank and event.attempt == number
    ]
    return started.payload.pid


def assert_nothing_left(run: RunDir, seconds: float = 10.0) -> None:
    """No process of the run exists on this machine."""
    wait_for(lambda: not leftovers(run.path), seconds, f"leftovers to vanish: {leftovers(run.path)}")
    holder = read_holder(run)
    assert holder is None or not holder.is_alive


def clean_up(run: RunDir) -> None:
    """End whatever a failed test left."""
    holder = read_holder(run)
    if holder is not None and holder.process.is_alive() and holder.process.pid != os.getpid():
        os.kill(holder.process.pid, signal.SIGKILL)
    for process in leftovers(run.path):
        process.kill()
