"""A killed rank costs few steps while snapshots lie in shared memory; the run ends with the very weights of
an uninterrupted one, and frees the memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.run.job_file import read_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.run.snapshots import drop, held_here, snapshots_of
from tests.support import launches
from tests.support import stand_in_runs as runs

pytestmark = pytest.mark.e2e

EVERY = 4
SETTINGS = (*launches.FOUR_RANKS, "train.steps=40", "checkpoint.every_steps=1000")
TIER = f"checkpoint.memory.every_steps={EVERY}"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path / "killed")
    yield run
    runs.clean_up(run)
    for attempt in run.attempt_numbers():
        for node in read_attempt_file(run.attempt(attempt).attempt_json).nodes:
            drop(snapshots_of(run.path, node))


def test_a_killed_rank_costs_few_steps(run: RunDir, tmp_path: Path) -> None:
    calm = RunDir(tmp_path / "calm")
    launches.end(launches.launch(calm, *SETTINGS, home=tmp_path), 0)
    command = launches.launch(run, *SETTINGS, TIER, home=tmp_path)
    runs.wait_for(lambda: runs.step_reached(run, 14), 120, "step 14")
    os.kill(runs.rank_pid(run, 2), signal.SIGKILL)
    launches.end(command, 0)
    assert launches.weights(run) == launches.weights(calm)

    first, second = read_record(run).attempts
    assert first.outcome == "failed"
    restored = runs.events(run, "restored")[-1].payload
    assert restored.reason == "from the nodes' memory"
    assert 0 <= first.reached_step - restored.step <= 10
    attempt = read_attempt_file(run.attempt(second.number).attempt_json)
    assert attempt.snapshot == restored.checkpoint == f"step-{restored.step:08d}.1"
    notes = [event.payload.message for event in runs.events(run, "notice")]
    assert f"goes on from step {restored.step} in the nodes' memory; there is no checkpoint" in notes
    folder = snapshots_of(run.path, attempt.nodes[0])
    assert held_here(folder) == []
    assert not folder.exists()
    runs.assert_nothing_left(run)
