"""The exactly-once audit: proves runs with restarts, and finds a planted gap, repeat, other range or other
cursor."""

from __future__ import annotations

import json

import pytest

from llmtrain.cli.main import run
from llmtrain.config.batch_ramp import BatchRamp
from llmtrain.config.recipe import BatchConfig
from llmtrain.corpus.audit import Audit
from llmtrain.corpus.audit import audit as audit_with_history
from llmtrain.corpus.ledger import AttemptLedger, Cursor, Skipped, StepRecord, read_ledgers
from llmtrain.events.schema import CheckpointCommitted, PhaseStarted, Restored, StepFinished
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir

SIZE = 8
BATCH = BatchConfig(global_size=SIZE)


def audit(*arguments) -> Audit:
    return audit_with_history(*arguments)[0]


def attempt(number, after, last, *, checkpoint=None, commits=(), batch=SIZE):
    """An attempt that did steps (after, last] as it should."""
    ledger = AttemptLedger(number, after, checkpoint)
    ledger.steps = [
        StepRecord(number, step, (step - 1) * batch, batch) for step in range(after + 1, last + 1)
    ]
    ledger.committed = {f"step-{step:08d}": step for step in commits}
    return ledger


def three_attempts():
    """10 of 13 steps kept; then 5 more of 8; then to 20. Attempt 3 died before it had a state."""
    return [
        attempt(1, 0, 13, commits=(5, 10)),
        attempt(2, 10, 18, checkpoint="step-00000010", commits=(15,)),
        AttemptLedger(3),
        attempt(4, 15, 20, checkpoint="step-00000015", commits=(20,)),
    ]


def test_a_run_without_restart():
    found = audit([attempt(1, 0, 20)], [Cursor("step-00000010", 10, 80)], BATCH)
    assert found.problems == []
    assert (found.steps, found.samples, found.discarded_samples) == (20, 160, 0)


def test_a_run_with_restarts():
    found = audit(three_attempts(), [Cursor("step-00000015", 15, 120)], BATCH)
    assert found.problems == []
    assert (found.steps, found.samples) == (20, 160)
    assert found.discarded_samples == (3 + 3) * SIZE
    rows = [
        (a.started_from, a.first_step, a.last_step, a.kept_steps, a.discarded_steps) for a in found.attempts
    ]
    assert rows == [
        ("seed", 1, 13, 10, 3),
        ("step-00000010", 11, 18, 5, 3),
        ("nothing", 0, 0, 0, 0),
        ("step-00000015", 16, 20, 5, 0),
    ]


def test_an_attempt_that_fell_back_further():
    """The newest checkpoint was damaged: attempt 2 went back to 5, though attempt 1 had committed 10."""
    found = audit(
        [attempt(1, 0, 13, commits=(5, 10)), attempt(2, 5, 9, checkpoint="step-00000005")], [], BATCH
    )
    assert found.problems == []
    assert (found.steps, found.samples, found.discarded_samples) == (9, 72, 64)


def test_a_commit_that_was_not_told():
    """Killed between the rename and the event: the step's own event tells who wrote it."""
    ledgers = three_attempts()
    ledgers[1].committed.clear()
    assert audit(ledgers, [], BATCH).problems == []


def test_a_run_from_imported_weights():
    """Its first checkpoint, of step 0, was written by no attempt."""
    found = audit([attempt(1, 0, 6, checkpoint="step-00000000")], [Cursor("step-00000000", 0, 0)], BATCH)
    assert found.problems == []
    assert (found.samples, found.attempts[0].started_from) == (48, "step-00000000")


def test_a_run_of_nothing():
    assert audit([]).problems == []
    assert audit([AttemptLedger(1)]).steps == 0


def change(ledger, step, **values):
    for number, record in enumerate(ledger.steps):
        if record.step == step:
            fields = {"attempt": record.attempt, "step": step, "first_sample": record.first_sample}
            ledger.steps[number] = StepRecord(**{**fields, "samples": record.samples, **values})


PLANTED = {
    "a gap": (lambda a: change(a[0], 4, first_sample=32), "step 4 (attempt 1): samples 24..31 are missing"),
    "a repeat": (
        lambda a: change(a[0], 4, first_sample=16),
        "step 4 (attempt 1): samples 16..23 were consumed again",
    ),
    "one sample again": (
        lambda a: change(a[3], 16, first_sample=119),
        "samples 119..119 were consumed again",
    ),
    "a short step": (lambda a: change(a[0], 7, samples=7), "step 7 (attempt 1) consumed 7 samples"),
    "no record": (lambda a: a[1].steps.pop(2), "no record of step 13 in attempt 2"),
    "a step twice": (lambda a: a[0].steps.append(a[0].steps[3]), "attempt 1 did step 4 twice"),
    "other samples when done again": (
        lambda a: change(a[0], 12, first_sample=200),
        "step 12 consumed samples 200..207 in attempt 1, but 88..95 in attempt 2",
    ),
    "an unknown checkpoint": (
        lambda a: setattr(a[1], "restored_step", 14) or setattr(a[1], "checkpoint", "step-00000014"),
        "attempt 2 started from step-00000014, which no earlier attempt is known to have written",
    ),
    "a jump without checkpoint": (
        lambda a: setattr(a[0], "restored_step", 3),
        "attempt 1 started at step 3, from no checkpoint",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name):
    plant, message = PLANTED[name]
    ledgers = three_attempts()
    plant(ledgers)
    found = audit(ledgers, [], BATCH)
    assert message in "\n".join(found.problems)
    assert found.samples < 160 or name == "other samples when done again"


def test_a_cursor_that_disagrees():
    found = audit(three_attempts(), [Cursor("step-00000015", 15, 128)], BATCH)
    assert found.problems == ["checkpoint step-00000015 says 128 samples, the events say 120"]


@pytest.fixture
def run_folder(tmp_path):
    """Two attempts written by the real event writer; the second file ends in a torn line."""
    folder = RunDir(tmp_path / "runs" / "r1")
    for number, (after, last) in {1: (0, 7), 2: (5, 12)}.items():
        path = folder.attempt(number).rank_events(0)
        path.parent.mkdir(parents=True)
        writer = EventWriter(path, run="r1", attempt=number, source="rank", rank=0)
        writer.emit(Restored(step=after, checkpoint=f"step-{after:08d}" if after else None))
        for step in range(after + 1, last + 1):
            writer.emit(PhaseStarted(phase="step", step=step))
            writer.emit(
                StepFinished(
                    step=step, loss=1.0, grad_norm=1.0, learning_rate=1.0, seconds=1.0, tokens=1,
                    tokens_per_second=1.0, first_sample=(step - 1) * SIZE, samples=SIZE,
                )
            )  # fmt: skip
            if step == 5:
                writer.emit(CheckpointCommitted(step=5, name="step-00000005", bytes=1, seconds=1.0))
        writer.close()
    with path.open("ab") as stream:
        stream.write(b'{"v":1,"time":1,"ru')
    folder.job_json.write_text('{"run_id": "r1", "spec": {"recipe": {"batch": {"global": 8}}}}')
    return folder


def test_the_command(run_folder, capsys, monkeypatch):
    monkeypatch.chdir(run_folder.path.parent.parent)
    assert run(["data", "audit", "r1", "--compare", "0"]) == 0
    seen = capsys.readouterr()
    assert "exactly once by the ledger: steps 1..12, samples 0..95; contents not compared" in seen.out
    assert run(["data", "audit", "r1", "--compare", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["proven"], document["samples"], document["discarded_samples"]) == (True, 96, 16)
    assert document["attempts"][1]["started_from"] == "step-00000005"


def test_what_is_not_compared_is_not_proven(run_folder, capsys, monkeypatch):
    """The order is right, but nothing says that the samples were the corpus's."""
    monkeypatch.chdir(run_folder.path.parent.parent)
    assert run(["data", "audit", "r1"]) == 1
    said = capsys.readouterr().out
    assert "not proven: order proven from the ledger, steps 1..12, samples 0..95; contents not " in said
    assert "exactly once" not in said
    assert run(["data", "audit", "r1", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["proven"], document["problems"]) == (False, [])
    assert document["not_compared"]


def test_the_command_finds_an_edited_file(run_folder, capsys, monkeypatch):
    monkeypatch.chdir(run_folder.path.parent.parent)
    path = run_folder.attempt(2).rank_events(0)
    lines = [line for line in path.read_text().splitlines() if '"step":9,' not in line]
    path.write_text("\n".join(lines) + "\n")
    assert run(["data", "audit", "r1"]) == 1
    seen = capsys.readouterr()
    assert "no record of step 9 in attempt 2 (1 of its events are lost)" in seen.err
    assert run(["data", "audit", "r1", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["proven"] is False
    assert document["samples"] == 64


def test_ledgers_of_a_real_file(run_folder):
    first, second = read_ledgers(run_folder)
    assert (first.restored_step, first.checkpoint, first.lost_events) == (0, None, 0)
    assert second.steps[0] == StepRecord(2, 6, 40, 8)
    assert first.committed == {"step-00000005": 5}


def test_skipped_samples_are_counted_once_and_only_in_the_history():
    ledgers = three_attempts()
    ledgers[0].skipped = [Skipped(8, 56, 8, "spike"), Skipped(10, 48, 32, "rewound")]
    ledgers[1].skipped = [Skipped(17, 128, 8, "nonfinite")]  # Discarded, and done again.
    found = audit(ledgers, [], BATCH)
    assert found.problems == []
    assert (found.samples, found.skipped_samples) == (160, 32)
    assert [skipped.reason for skipped in found.skipped] == ["spike", "rewound"]


def test_samples_skipped_that_were_never_consumed():
    ledgers = [attempt(1, 0, 5)]
    ledgers[0].skipped = [Skipped(5, 32, 16, "spike")]
    assert audit(ledgers, [], BATCH).problems == [
        "step 5 left out samples up to 47, but only 40 were consumed"
    ]


def test_a_batch_that_grows():
    batch = BatchConfig(global_size=8, ramp=BatchRamp(start=2, steps=6, increment=2))
    ledger = AttemptLedger(1, 0, None)
    ledger.steps = [StepRecord(1, step, batch.samples_before(step), batch.at(step)) for step in range(1, 12)]
    assert audit([ledger], [], batch).problems == []
    change(ledger, 3, samples=2)
    assert "step 3 (attempt 1) consumed 2 samples, the recipe's global batch is 4" in "\n".join(
        audit([ledger], [], batch).problems
    )
