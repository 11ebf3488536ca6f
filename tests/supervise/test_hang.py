"""A rank that does nothing any more: found by silence, its stacks asked for, the run goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.backends.registry import load_backend
from llmtrain.run.job_file import read_job_file
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import acquire
from llmtrain.run.record import read_record
from llmtrain.supervise.control import Control
from llmtrain.supervise.detection.limits import PHASE_SECONDS, Limits
from llmtrain.supervise.supervisor import Supervisor
from tests.support import stand_in_runs as runs

STEP_LIMIT = 2.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = runs.make_run(tmp_path / "run", steps=5, hang={"rank": 1, "step": 3})
    runs.use_corpus(run, runs.prepared_corpus(tmp_path))
    yield run
    runs.clean_up(run)


def test_hang_is_found_after_its_limit_and_cured_by_a_restart(run: RunDir) -> None:
    job = read_job_file(run.job_json)
    limits = Limits(phases={**PHASE_SECONDS, "step": STEP_LIMIT}, stacks=0.3)
    lease = acquire(run)
    try:
        backend = load_backend(job.spec.cluster)
        control = Control(run, limits.save)
        status = Supervisor(run, job, backend, lease, control=control, limits=limits).run()
    finally:
        lease.release()
    assert status == 0
    record = read_record(run)
    assert [(attempt.outcome, attempt.cause) for attempt in record.attempts] == [
        ("failed", "hang"),
        ("completed", ""),
    ]
    [found] = runs.events(run, "found")
    assert "furthest behind: rank 1, in phase `step` of step 3" in found.payload.message
    last = max(event.time for event in runs.events(run) if event.attempt == 1 and event.source == "rank")
    assert STEP_LIMIT - 0.1 <= found.time - last < STEP_LIMIT + 10.0
    assert (run.path / "stacks-1").exists(), "rank 1 was asked for its stacks"
    runs.assert_nothing_left(run)


def test_a_suspended_supervisor_raises_no_alarm(run: RunDir) -> None:
    """It sees an old clock, not silent nodes: SIGSTOP for longer than nodes may be silent."""
    (run.path / "behaviour.json").write_text('{"steps": 20, "step_seconds": 0.3}')
    supervisor = runs.supervise(run)
    runs.wait_for(lambda: runs.step_reached(run, 2), what="step 2")
    os.kill(supervisor.pid, signal.SIGSTOP)
    time.sleep(Limits().node_silence + 2.0)
    os.kill(supervisor.pid, signal.SIGCONT)
    assert supervisor.wait(60) == 0
    assert not runs.events(run, "found")
    assert len(read_record(run).attempts) == 1
