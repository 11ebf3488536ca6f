"""What an attempt achieved whose supervisor died before it could write that down."""

from __future__ import annotations

import time
from dataclasses import replace

from llmtrain.events.reader import read_events
from llmtrain.events.schema import AttemptEnded, CheckpointCommitted, StepFinished
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir
from llmtrain.run.record import AttemptRecord

CAUSE = "its supervisor died"


def close_abandoned(run: RunDir, attempt: AttemptRecord) -> AttemptRecord:
    """The attempt as ended, with the steps and checkpoints that its events tell of; says so in its events.

    Call it when nothing of the attempt runs any more.
    """
    folder = run.attempt(attempt.number)
    reached = committed = 0
    last = attempt.started
    for event in read_events(folder.rank_events(0)):
        last = max(last, event.time)
        match event.payload:
            case StepFinished(step=step):
                reached = max(reached, step)
            case CheckpointCommitted(step=step):
                committed = max(committed, step)
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
