"""The commands around a real run: launch, --detach, resume, stop, SIGTERM, their exit codes and words."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import launches
from tests.support import stand_in_runs as runs

pytestmark = pytest.mark.e2e

TWO_RANKS = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launches")


@pytest.fixture(scope="module")
def done(folder: Path) -> RunDir:
    """A run that went to its end without disturbance."""
    run = RunDir(folder / "done")
    _, talk = launches.end(launches.launch(run, *TWO_RANKS, home=folder), 0)
    assert f"step {launches.STEPS}/{launches.STEPS}" in talk
    return run


@pytest.fixture
def run(folder: Path, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    run = RunDir(folder / request.node.name.replace("[", "-").strip("]"))
    yield run
    runs.clean_up(run)


def command(folder: Path, status: int, *arguments: str) -> tuple[str, str]:
    return launches.end(launches.start(folder, *arguments, home=folder), status)


def test_finished_run(done: RunDir, folder: Path) -> None:
    record = read_record(done)
    assert (record.exit_status, record.reached_step, record.committed_step) == (
        0,
        launches.STEPS,
        launches.STEPS,
    )
    assert [attempt.outcome for attempt in record.attempts] == ["completed"]
    runs.assert_nothing_left(done)
    _, talk = command(folder, 0, "resume", str(done.path))
    assert f"run done is done: step {launches.STEPS} was the last one" in talk
    out, _ = command(folder, 0, "resume", str(done.path), "--json")
    assert json.loads(out) == {"schema": 1, "run": "done", "path": str(done.path), "exit_status": 0}
    _, talk = command(folder, 0, "stop", str(done.path))
    assert "run done: was not running" in talk
    _, talk = command(folder, 2, "launch", "tiny", "--run-dir", str(done.path))
    assert f"go on with it by `llmtrain resume {done.path}`" in talk
    assert len(read_record(done).attempts) == 1


def test_detach_refuse_stop_resume_sigterm_resume(run: RunDir, done: RunDir, folder: Path) -> None:
    started = launches.launch(run, *TWO_RANKS, "train.steps=400", home=folder, options=("--detach", "--json"))
    out, _ = launches.end(started, 0)
    assert json.loads(out)["job"].startswith("local://")
    _, talk = command(folder, 2, "resume", str(run.path))
    assert "is already supervised by pid" in talk
    runs.wait_for(lambda: runs.step_reached(run, 2), 120, "step 2")
    _, talk = command(folder, 0, "stop", str(run.path))
    assert "stopped as asked; newest checkpoint: step" in talk
    stopped = read_record(run)
    assert stopped.exit_status == 75 and stopped.committed_step >= 2
    runs.assert_nothing_left(run)

    resumed = launches.start(folder, "resume", str(run.path), home=folder)
    runs.wait_for(lambda: runs.step_reached(run, stopped.committed_step + 2, attempt=2), 120, "more steps")
    resumed.send_signal(signal.SIGTERM)
    _, talk = launches.end(resumed, 75)
    assert "stopping: the ranks save at the end of the current step and leave" in talk
    again = read_record(run)
    assert again.exit_status == 75 and again.committed_step > stopped.committed_step
    assert runs.events(run, "restored")[-1].payload.step == stopped.committed_step
    runs.assert_nothing_left(run)


def test_missing_checkpoints_are_refused_and_never_fresh(run: RunDir, folder: Path) -> None:
    import shutil

    started = launches.launch(run, *TWO_RANKS, "train.steps=400", home=folder, options=("--detach",))
    launches.end(started, 0)
    runs.wait_for(lambda: runs.events(run, "checkpoint_committed"), 120, "a checkpoint")
    command(folder, 0, "stop", str(run.path), "--now")
    assert read_record(run).exit_status == 75
    runs.assert_nothing_left(run)
    for entry in run.checkpoints.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    _, talk = command(folder, 1, "resume", str(run.path))
    assert "its checkpoints are gone" in talk
    assert len(read_record(run).attempts) == 1
