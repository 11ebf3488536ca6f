"""What an attempt achieved whose supervisor died before it could write that down."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from llmtrain.events.reader import read_events, size_of
from llmtrain.events.schema import AttemptEnded, CheckpointCommitted, StepFinished
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir
from llmtrain.run.record import AttemptRecord

CAUSE = "its supervisor died"
TAIL_BYTES = 1 << 22
"""First look at the events, from their end: hours of a usual run, decoded in less than a second."""


def close_abandoned(run: RunDir, attempt: AttemptRecord) -> AttemptRecord:
    """The attempt as ended, with the steps and checkpoints that its events tell of; says so in its events.

    Call it when nothing of the attempt runs any more.
    """
    folder = run.attempt(attempt.number)
    reached, committed, last = _last_words(folder.rank_events(0), attempt.started)
    with EventWriter(
        folder.supervisor_events, run=run.run_id, attempt=attempt.number, source="supervisor"
    ) as writer:
        writer.emit(AttemptEnded(outcome="failed", cause=CAUSE, seconds=last - attempt.started))
    return replace(
        attempt,
        outcome="abandoned",
        ended=time.time(),
        error=CAUSE,
        reached_step=reached,
        committed_step=committed,
    )


def _last_words(path: Path, started: float) -> tuple[int, int, float]:
    """Newest step that was done, newest that was committed (0 for none), and the latest time told (epoch
    seconds), from the end of a rank's events; a week's are gigabytes, and a run waits for this."""
    tail = TAIL_BYTES
    while True:
        reached, committed, last = 0, 0, started
        for event in read_events(path, tail_bytes=tail):
            last = max(last, event.time)
            match event.payload:
                case StepFinished(step=step):
                    reached = max(reached, step)
                case CheckpointCommitted(step=step):
                    committed = max(committed, step)
        if (reached and committed) or tail >= size_of(path):
            return reached, committed, last
        tail *= 8
