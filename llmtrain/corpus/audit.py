"""The exactly-once audit: which samples the run's state was trained on, over all attempts, layouts and
restarts.

The state's history is one chain: the last attempt's steps, before them those of the attempt that wrote the
checkpoint it started from, and so on back to the seed. Along that chain every sample must be consumed once,
in order, without a gap. What other attempts did after the checkpoint that was gone on from is thrown away; it
must have been the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain.config.recipe import BatchConfig
from llmtrain.corpus.ledger import AttemptLedger, Cursor, Skipped, StepRecord

MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class AttemptAudit:
    """One attempt's part in the history."""

    number: int
    started_from: str
    """Name of a checkpoint, `seed`, or `nothing` when it never had a state."""
    first_step: int
    """First and last step it finished; 0 when none."""
    last_step: int
    kept_steps: int
    """Steps that the state descends from."""
    discarded_steps: int
    """Steps done after the checkpoint that was gone on from, and done again later."""


@dataclass(slots=True)
class Audit:
    """The verdict."""

    steps: int = 0
    """Steps in the state's history."""
    samples: int = 0
    """Samples proven to be consumed exactly once, from sample 0 on."""
    discarded_samples: int = 0
    """Samples of discarded steps."""
    skipped_samples: int = 0
    """Samples of the history that the weights were not trained on."""
    skipped: list[Skipped] = field(default_factory=list)
    """The same, range by range, each with its reason; they may overlap."""
    told_digests: int = 0
    """Steps of the history that told a digest of what was read."""
    compared_digests: int = 0
    """Of these, steps whose samples were read again and compared (`evidence.py`)."""
    attempts: list[AttemptAudit] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Empty: exactly once is proven for everything that was told."""

    def problem(self, text: str) -> None:
        """Note a problem; more than MOST_PROBLEMS say nothing new."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(text)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Steps (after, last] of one attempt."""

    ledger: AttemptLedger
    after: int
    last: int


def audit(
    ledgers: Sequence[AttemptLedger], cursors: Sequence[Cursor] = (), batch: BatchConfig | None = None
) -> tuple[Audit, dict[int, StepRecord]]:
    """Check all attempts of a run, in order; pure. Returns the verdict and the steps of the history.

    `cursors` are the checkpoints on disk, which must agree; `batch` is the recipe's.
    """
    result = Audit()
    chain = _history(ledgers, result)
    consumed_after = {0: 0}
    history: dict[int, StepRecord] = {}
    for segment in chain:
        _follow(segment, history, consumed_after, result)
    result.steps = len(history)
    for record in history.values():
        _check_record(record, batch, result)
    _check_discarded(ledgers, history, result)
    _note_skipped(chain, result)
    for cursor in cursors:
        expected = consumed_after.get(cursor.step)
        if expected is not None and expected != cursor.consumed_samples:
            result.problem(
                f"checkpoint {cursor.name} says {cursor.consumed_samples} samples, the events say {expected}"
            )
    return result, history


def _check_record(record: StepRecord, batch: BatchConfig | None, result: Audit) -> None:
    who = f"step {record.step} (attempt {record.attempt})"
    if batch is not None and record.samples != batch.at(record.step):
        wanted = f"the recipe's global batch is {batch.at(record.step)}"
        result.problem(f"{who} consumed {record.samples} samples, {wanted}")
    if record.digest is not None:
        result.told_digests += 1
        if record.digest < 0:
            result.problem(f"{who}: ranks of one replica read different samples")


def _note_skipped(chain: Sequence[_Segment], result: Audit) -> None:
    """Samples that were left out in steps of the history; what a discarded step left out was done again."""
    result.skipped = [
        skipped
        for segment in chain
        for skipped in segment.ledger.skipped
        if segment.after < skipped.step <= segment.last
    ]
    covered = 0
    for skipped in sorted(result.skipped, key=lambda skipped: skipped.first_sample):
        result.skipped_samples += max(0, skipped.end_sample - max(covered, skipped.first_sample))
        covered = max(covered, skipped.end_sample)
        if skipped.end_sample > result.samples and not result.problems:
            result.problem(
                f"step {skipped.step} left out samples up to {skipped.end_sample - 1}, "
                f"but only {result.samples} were consumed"
            )


def _history(ledgers: Sequence[AttemptLedger], result: Audit) -> list[_Segment]:
    """The chain of segments, oldest first."""
    by_number = {ledger.number: ledger for ledger in ledgers}
    alive = [ledger for ledger in ledgers if ledger.restored_step is not None]
    chain: list[_Segment] = []
    current = alive[-1] if alive else None
    last = (
        max((record.step for record in current.steps), default=current.restored_step or 0) if current else 0
    )
    while current is not None:
        after = current.restored_step or 0
        chain.append(_Segment(current, after, last))
        if current.checkpoint is None or not after:  # step 0: the seed, or imported weights
            if after:
                result.problem(f"attempt {current.number} started at step {after}, from no checkpoint")
            break
        source = _writer_of(current.checkpoint, after, current.number, alive)
        if source is None:
            result.problem(
                f"attempt {current.number} started from {current.checkpoint}, which no earlier attempt "
                f"is known to have written"
            )
        current, last = (by_number[source] if source is not None else None), after
    return chain[::-1]


def _writer_of(checkpoint: str, step: int, before: int, alive: Sequence[AttemptLedger]) -> int | None:
    """The latest earlier attempt that committed a checkpoint, or (killed before it could say so) that did its
    step."""
    earlier = [ledger for ledger in alive if ledger.number < before]
    for ledger in reversed(earlier):
        if checkpoint in ledger.committed:
            return ledger.number
    for ledger in reversed(earlier):
        if any(record.step == step for record in ledger.steps):
            return ledger.number
    return None


def _follow(
    segment: _Segment, history: dict[int, StepRecord], consumed_after: dict[int, int], result: Audit
) -> None:
    """Check one segment's steps against what the history has consumed before."""
    number = segment.ledger.number
    records: dict[int, StepRecord] = {}
    for record in segment.ledger.steps:
        if record.step in records:
            result.problem(f"attempt {number} did step {record.step} twice")
        records[record.step] = record
    for step in range(segment.after + 1, segment.last + 1):
        found = records.get(step)
        if found is None:
            lost = segment.ledger.lost_events
            because = f" ({lost} of its events are lost)" if lost else ""
            result.problem(f"no record of step {step} in attempt {number}{because}")
            continue
        expected = consumed_after.get(step - 1)
        if expected is not None and found.first_sample != expected:
            fault = "are missing" if found.first_sample > expected else "were consumed again"
            low, high = sorted((found.first_sample, expected))
            result.problem(f"step {step} (attempt {number}): samples {low}..{high - 1} {fault}")
        if expected is not None and found.first_sample == expected and not result.problems:
            result.samples = found.end_sample
        consumed_after[step] = found.end_sample
        history[step] = found


def _check_discarded(ledgers: Sequence[AttemptLedger], history: dict[int, StepRecord], result: Audit) -> None:
    """Steps outside the chain must have consumed what the chain consumed for the same step."""
    for ledger in ledgers:
        kept = 0
        for record in ledger.steps:
            same = history.get(record.step)
            if same is record:
                kept += 1
                continue
            result.discarded_samples += record.samples
            if same and (same.first_sample, same.samples) != (record.first_sample, record.samples):
                here, there = (f"{r.first_sample}..{r.end_sample - 1}" for r in (record, same))
                result.problem(
                    f"step {record.step} consumed samples {here} in attempt {record.attempt}, "
                    f"but {there} in attempt {same.attempt}"
                )
            elif same and None not in (same.digest, record.digest) and same.digest != record.digest:
                result.problem(
                    f"step {record.step} read other data in attempt {record.attempt} than in attempt "
                    f"{same.attempt}, for the same samples"
                )
        steps = [record.step for record in ledger.steps]
        origin = "nothing" if ledger.restored_step is None else ledger.checkpoint or "seed"
        result.attempts.append(
            AttemptAudit(
                ledger.number, origin, min(steps, default=0), max(steps, default=0), kept, len(steps) - kept
            )
        )
