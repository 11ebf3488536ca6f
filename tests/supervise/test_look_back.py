"""What an attempt without a supervisor achieved, read from the end of long event files."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.events import reader
from llmtrain.events.event import Event, decode_line, encode_line
from llmtrain.events.schema import CheckpointCommitted, Notice, Payload, StepFinished
from llmtrain.run.layout import RunDir
from llmtrain.run.record import AttemptRecord
from llmtrain.supervise import look_back

STEPS = 3000


def step_of(number: int) -> StepFinished:
    rates = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "seconds": 0.5, "tokens_per_second": 4.0}
    return StepFinished(step=number, tokens=2, first_sample=number, samples=1, **rates)


def run_that_told(folder: Path, payloads: list[Payload]) -> RunDir:
    run = RunDir(folder / "run")
    path = run.attempt(1).rank_events(0)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        for number, payload in enumerate(payloads):
            event = Event(
                time=100.0 + number, run="run", attempt=1, source="rank", rank=0, seq=number, payload=payload
            )
            file.write(encode_line(event))
    return run


def closed(run: RunDir) -> AttemptRecord:
    return look_back.close_abandoned(run, AttemptRecord(number=1, started=90.0))


@pytest.mark.parametrize(("every", "committed"), [(100, 2900), (2500, 2500), (STEPS + 1, 0)])
def test_the_last_step_and_commit_are_found_from_the_end(tmp_path, monkeypatch, every, committed) -> None:
    decoded = list[bytes]()
    payloads = list[Payload]()
    for number in range(1, STEPS):
        payloads.append(step_of(number))
        if number % every == 0:
            payloads.append(CheckpointCommitted(step=number, name=f"step-{number}", bytes=1, seconds=1.0))
    run = run_that_told(tmp_path, payloads)
    monkeypatch.setattr(look_back, "TAIL_BYTES", 1 << 15)
    monkeypatch.setattr(reader, "decode_line", lambda line: decoded.append(line) or decode_line(line))
    attempt = closed(run)
    assert (attempt.outcome, attempt.reached_step, attempt.committed_step) == (
        "abandoned",
        STEPS - 1,
        committed,
    )
    [ended] = reader.read_events(run.attempt(1).supervisor_events)
    assert ended.payload.seconds == 100.0 + len(payloads) - 1 - 90.0
    assert len(decoded) < {100: 300, 2500: STEPS}.get(every, 2 * STEPS)


def test_an_attempt_that_told_nothing_or_never_stepped_reached_nothing(tmp_path) -> None:
    for name, payloads in (("nothing", []), ("no step", [Notice(message="began")])):
        attempt = closed(run_that_told(tmp_path / name, payloads))
        assert (attempt.reached_step, attempt.committed_step) == (0, 0)
