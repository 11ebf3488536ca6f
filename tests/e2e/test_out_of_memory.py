"""A rank of several that runs out of memory costs one restart: the run goes on with a smaller micro-batch,
the same global batch, and the very samples that it would have had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain.events.schema import MicroBatchChanged, RankFailed, Restored, StepFinished
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import launches
from tests.support import stand_in_runs as runs

pytestmark = pytest.mark.e2e

FULL_RANK, STEP = 2, 5
"""Rank 2 is the first replica's second stage; its last checkpoint is of step 3."""
FAULT = f"faults.inject=[{{kind: out_of_memory, step: {STEP}, rank: {FULL_RANK}}}]"


def test_a_rank_without_memory_is_one_restart_with_a_smaller_micro_batch(run: RunDir, tmp_path: Path) -> None:
    changes = ("batch.micro=auto", "batch.global=16", FAULT)
    launches.end(launches.launch(run, *launches.FOUR_RANKS, *changes, home=tmp_path), 0)
    first, second = read_record(run).attempts
    assert (first.outcome, first.cause, second.outcome) == ("failed", "rank_failed", "completed")
    failed = [event.payload for event in runs.events(run, "rank_failed") if event.rank == FULL_RANK]
    assert [(f.error_class, f.step) for f in failed if isinstance(f, RankFailed)] == [("out_of_memory", STEP)]
    planned = json.loads(run.attempt(1).attempt_json.read_text())["layout"]["micro_batch"]
    [changed] = [event.payload for event in runs.events(run, "micro_batch_changed")]
    assert isinstance(changed, MicroBatchChanged)
    assert changed.before == planned > changed.micro_batch
    assert changed.reason == f"rank {FULL_RANK} ran out of memory with {planned} in attempt 1"
    [_, restored] = [e.payload for e in runs.events(run, "restored") if isinstance(e.payload, Restored)]
    assert restored.step == 3
    steps = [e.payload for e in runs.events(run, "step_finished") if isinstance(e.payload, StepFinished)]
    assert [step.step for step in steps] == [*range(1, STEP), *range(4, launches.STEPS + 1)]
    assert all((step.samples, step.first_sample) == (16, 16 * (step.step - 1)) for step in steps)
    [before, again] = [step for step in steps if step.step == 4]
    assert before.data_digest == again.data_digest != -1
    assert before.loss == pytest.approx(again.loss, abs=5e-3)
    audit = launches.start(tmp_path, "data", "audit", str(run.path), home=tmp_path)
    launches.end(audit, 0)
    runs.assert_nothing_left(run)
