"""Storage that is full for a while ends no run."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.agent.sweep import leftovers
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.supervise import storage
from llmtrain.supervise.control import Control
from tests.support import chaos_ground
from tests.support import stand_in_runs as runs


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of its own."""
    with chaos_ground.storage() as folder:
        yield folder


def test_what_passes() -> None:
    assert storage.may_pass(OSError(errno.ENOSPC, "full"))
    assert storage.may_pass(OSError(errno.ESTALE, "the server was away"))
    assert not storage.may_pass(PermissionError(errno.EACCES, "not yours"))


def test_waiting_ends_when_there_is_room_when_a_stop_is_wanted_or_when_time_is_over(small_disk: Path) -> None:
    run = RunDir(small_disk)
    control = Control(run, 60.0)
    assert storage.wait_for_storage(small_disk, control)
    assert not list(small_disk.iterdir())
    with chaos_ground.full(small_disk):
        began = time.monotonic()
        assert not storage.wait_for_storage(small_disk, control, patience=1.5)
        assert time.monotonic() - began >= 1.5
        run.stop_file.touch()
        assert not storage.wait_for_storage(small_disk, control)


@pytest.mark.e2e
def test_a_restart_waits_for_room(small_disk: Path, tmp_path: Path) -> None:
    run = runs.make_run(small_disk / "run", steps=20, step_seconds=0.2, no_checkpoints=True)
    runs.use_corpus(run, runs.prepared_corpus(tmp_path))
    supervisor = runs.supervise(run)
    try:
        runs.wait_for(lambda: runs.step_reached(run, 3), what="step 3")
        with chaos_ground.full(small_disk):
            os.kill(runs.rank_pid(run, 1), 9)
            runs.wait_for(lambda: not leftovers(run.path), what="the ranks to leave")
            time.sleep(3.0)
            assert supervisor.poll() is None
        assert supervisor.wait(60) == 0, told(run)
        assert "went on after: [Errno 28]" in told(run)
        assert [attempt.outcome for attempt in read_record(run).attempts] == ["abandoned", "completed"]
        runs.assert_nothing_left(run)
    finally:
        runs.clean_up(run)


def told(run: RunDir) -> str:
    return run.supervisor_log.read_text()
