"""A real rank that stops, or never comes to a collective, is found by the others' silence and named."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.supervise.detection.pace import STEP_FACTOR, STEP_FLOOR, STEPS_BEFORE
from tests.support import launches
from tests.support import stand_in_runs as runs

pytestmark = pytest.mark.e2e

STEPS = 60
VICTIM = 2
LOOK_SECONDS = 6.0
"""For pings, questions and answers on a loaded machine, beyond the limit itself."""


def test_stopped_rank_is_named_and_the_run_goes_on(run: RunDir, tmp_path: Path) -> None:
    command = launches.launch(run, *launches.FOUR_RANKS, f"train.steps={STEPS}", home=tmp_path)
    runs.wait_for(lambda: runs.step_reached(run, STEPS_BEFORE + 2), 240, "steps")
    os.kill(runs.rank_pid(run, VICTIM), signal.SIGSTOP)
    stopped_at = time.time()
    launches.end(command, 0)
    [found] = runs.events(run, "found")
    assert (found.payload.finding, found.payload.rank) == ("hang", VICTIM), found.payload.message
    assert f"rank {VICTIM} is stopped by a signal or a debugger" in found.payload.message
    slowest = max(event.payload.seconds for event in runs.events(run, "step_finished"))
    assert found.time - stopped_at < max(STEP_FLOOR, STEP_FACTOR * slowest) + LOOK_SECONDS
    told = json.loads(run.attempt(1).post_mortem_json.read_text())
    assert (told["cause"], told["rank"]) == ("hang", VICTIM)
    assert told["ranks"][VICTIM]["state"] == "T" and told["collectives"]
    with_stacks = {rank for group in told["stacks"] for rank in group["ranks"]}
    assert with_stacks == set(range(4)) - {VICTIM}, "all but the one that is stopped wrote their stacks"
    ends = [(attempt.outcome, attempt.cause) for attempt in read_record(run).attempts]
    assert ends == [("failed", "hang"), ("completed", "")]
    runs.assert_nothing_left(run)


def test_rank_that_never_comes_is_named_by_its_missing_collective(run: RunDir, tmp_path: Path) -> None:
    fault = f"faults.inject=[{{kind: hang, step: {STEPS_BEFORE + 3}, rank: {VICTIM}}}]"
    command = launches.launch(
        run, *launches.FOUR_RANKS, f"train.steps={STEPS_BEFORE + 6}", fault, home=tmp_path
    )
    launches.end(command, 0)
    [found] = runs.events(run, "found")
    assert (found.payload.finding, found.payload.rank) == ("hang", VICTIM), found.payload.message
    assert f"rank {VICTIM} is at `fetch` of step {STEPS_BEFORE + 3}" in found.payload.message
    runs.assert_nothing_left(run)
