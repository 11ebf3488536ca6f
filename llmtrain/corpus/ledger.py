"""What a run consumed, from the events of all its attempts: the evidence for an audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llmtrain.errors import CheckpointError
from llmtrain.events.event import Event
from llmtrain.events.reactions import SamplesSkipped
from llmtrain.events.reader import read_events
from llmtrain.events.schema import CheckpointCommitted, Restored, StepFinished
from llmtrain.run.checkpoints import list_checkpoints, read_manifest
from llmtrain.run.layout import RunDir


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, as rank 0 told it."""

    attempt: int
    step: int
    first_sample: int
    samples: int
    digest: int | None = None
    """Of what all ranks read (`samples.py`); -1: ranks of one replica read different samples; None: not
    told."""

    @property
    def end_sample(self) -> int:
        """Sample after the last one."""
        return self.first_sample + self.samples


@dataclass(frozen=True, slots=True)
class Skipped:
    """Samples that were consumed but did not change the weights, or whose change was taken back."""

    step: int
    """Step after which they were found not to count."""
    first_sample: int
    samples: int
    reason: str

    @property
    def end_sample(self) -> int:
        """Sample after the last one."""
        return self.first_sample + self.samples


@dataclass(slots=True)
class AttemptLedger:
    """What one attempt started from and did."""

    number: int
    restored_step: int | None = None
    """Last step in the state that it started from; None: it never had a state."""
    checkpoint: str | None = None
    """Name of the checkpoint it started from; None: from the seed."""
    steps: list[StepRecord] = field(default_factory=list)
    committed: dict[str, int] = field(default_factory=dict)
    """Checkpoints that it committed, with their steps."""
    skipped: list[Skipped] = field(default_factory=list)
    lost_events: int = 0
    """Events of rank 0 that its writer counted but that are not in the file."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a checkpoint on disk says."""

    name: str
    step: int
    consumed_samples: int


def read_ledgers(run: RunDir) -> list[AttemptLedger]:
    """Ledgers of all attempts, in order, from the event files of their rank 0."""
    return [
        ledger_of(number, read_events(run.attempt(number).rank_events(0))) for number in run.attempt_numbers()
    ]


def ledger_of(number: int, events: Iterable[Event]) -> AttemptLedger:
    """Fold the events of one attempt's rank 0."""
    ledger = AttemptLedger(number)
    last_seq = -1
    for event in events:
        if event.seq > last_seq + 1:
            ledger.lost_events += event.seq - last_seq - 1
        last_seq = max(last_seq, event.seq)
        match event.payload:
            case Restored() as restored:
                ledger.restored_step, ledger.checkpoint = restored.step, restored.checkpoint
            case StepFinished() as done:
                record = StepRecord(number, done.step, done.first_sample, done.samples, done.data_digest)
                ledger.steps.append(record)
            case SamplesSkipped() as left:
                ledger.skipped.append(Skipped(left.step, left.first_sample, left.samples, left.reason))
            case CheckpointCommitted() as committed:
                ledger.committed[committed.name] = committed.step
            case _:
                pass
    return ledger


def read_cursors(run: RunDir) -> tuple[list[Cursor], Mapping[str, str]]:
    """Data cursors of the checkpoints on disk, oldest first; and names of unreadable ones, each with the
    reason."""
    cursors: list[Cursor] = []
    unreadable: dict[str, str] = {}
    for checkpoint in reversed(list_checkpoints(run.checkpoints)):
        try:
            info = read_manifest(checkpoint.path).info
        except CheckpointError as error:
            unreadable[checkpoint.name] = str(error)
        else:
            cursors.append(Cursor(checkpoint.name, info.step, info.consumed_samples))
    return cursors, unreadable
