"""Was what was read what the corpora hold? Steps are read again, and digests compared with the ledger's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from llmtrain.corpus.audit import Audit
from llmtrain.corpus.ledger import StepRecord
from llmtrain.corpus.samples import Samples, step_digest


def compare_digests(
    history: Iterable[StepRecord],
    samples: Samples,
    result: Audit,
    *,
    most: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Read the samples of at most so many steps again, spread evenly over the history, first and last among
    them, and note where the digest that was told differs. Raises CorpusError.

    `progress(done, total)` counts steps.
    """
    told = [record for record in history if record.digest is not None and record.digest >= 0]
    told.sort(key=lambda record: record.step)
    chosen = spread(told, most)
    for number, record in enumerate(chosen, 1):
        digest = _digest(samples, record.first_sample, record.samples)
        if digest != record.digest:
            result.problem(
                f"step {record.step} (attempt {record.attempt}) did not read samples {record.first_sample}.."
                f"{record.end_sample - 1} of the corpora{_instead(samples, record)}"
            )
        result.compared_digests += 1
        progress(number, len(chosen))


def spread(records: Sequence[StepRecord], most: int | None) -> list[StepRecord]:
    """At most so many of them, at equal distances, first and last included."""
    if most is None or len(records) <= most:
        return list(records)
    if most < 2:
        return list(records[:most])
    places = sorted({round(place * (len(records) - 1) / (most - 1)) for place in range(most)})
    return [records[place] for place in places]


def _instead(samples: Samples, record: StepRecord) -> str:
    """What it read instead, where that is another step of the same size close by."""
    for distance in (-1, 1, -2, 2):
        first = record.first_sample + distance * record.samples
        if first >= 0 and _digest(samples, first, record.samples) == record.digest:
            return f", but those of step {record.step + distance}"
    return ""


def _digest(samples: Samples, first: int, count: int) -> int:
    return step_digest(samples.read(sample).digest for sample in range(first, first + count))
