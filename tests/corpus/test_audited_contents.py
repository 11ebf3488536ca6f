"""The audit of contents: steps tell a digest of what they read, which is read again and compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.corpus.audit import audit as audit_with_history
from llmtrain.corpus.evidence import compare_digests, spread
from llmtrain.corpus.ledger import StepRecord
from llmtrain.corpus.samples import Samples, sample_digest, step_digest
from tests.corpus.test_audit import BATCH, three_attempts


class Numbered:
    """Windows whose tokens say which one they are."""

    def windows(self, sequence):
        return 41

    def window(self, index, sequence):
        return np.arange(index * sequence, (index + 1) * sequence + 1)


def really_read(ledgers, sequence=16):
    """The ledgers, with the digests that ranks tell when they read what they should."""
    samples = Samples([Numbered()], sequence=sequence, seed=3)
    for ledger in ledgers:
        for number, record in enumerate(ledger.steps):
            read = [samples.read(sample).digest for sample in range(record.first_sample, record.end_sample)]
            ledger.steps[number] = replace(record, digest=step_digest(read))
    return ledgers, samples


def checked(ledgers, samples, most=None):
    result, history = audit_with_history(ledgers, [], BATCH)
    compare_digests(history.values(), samples, result, most=most)
    return result


def test_what_was_read_is_what_the_corpus_holds():
    found = checked(*really_read(three_attempts()))
    assert found.problems == []
    assert (found.told_digests, found.compared_digests) == (20, 20)
    some = checked(*really_read(three_attempts()), most=5)
    assert (some.problems, some.compared_digests) == ([], 5)


def wrong_data(ledger, step, digest):
    place = next(at for at, record in enumerate(ledger.steps) if record.step == step)
    ledger.steps[place] = replace(ledger.steps[place], digest=digest(ledger.steps[place - 1].digest))


READ_WRONG = {
    "the step before again": (lambda a: wrong_data(a[0], 4, lambda before: before), "but those of step 3"),
    "other data": (lambda a: wrong_data(a[1], 13, lambda _: 12345), "did not read samples 96..103"),
    "ranks that differ": (
        lambda a: wrong_data(a[0], 5, lambda _: -1),
        "step 5 (attempt 1): ranks of one replica read different samples",
    ),
    "other data when done again": (
        lambda a: wrong_data(a[0], 12, lambda _: 77),
        "step 12 read other data in attempt 1 than in attempt 2, for the same samples",
    ),
}


@pytest.mark.parametrize("name", READ_WRONG)
def test_planted_wrong_data_is_found(name):
    """The cursor is right, but ranks read something else."""
    plant, message = READ_WRONG[name]
    ledgers, samples = really_read(three_attempts())
    plant(ledgers)
    assert message in "\n".join(checked(ledgers, samples).problems)


@given(
    steps=st.lists(st.integers(0, 40), unique=True, min_size=1),
    fault=st.sampled_from(["repeat", "lose", "swap", "change"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_one_wrong_sample_changes_the_digest(steps, fault, seed):
    samples = Samples([Numbered()], sequence=16, seed=seed)
    read = [samples.read(step) for step in steps]
    told = [sample.digest for sample in read]
    if fault == "repeat":
        wrong = [*told[:-1], told[0]] if len(told) > 1 else [told[0], told[0]]
    elif fault == "lose":
        wrong = told[1:]
    elif fault == "swap":  # The right window, counted as another sample.
        wrong = [*told[1:], sample_digest(steps[0] + 1, read[0].tokens)]
    else:
        tokens = read[0].tokens.copy()
        tokens[-1] += 1
        wrong = [*told[1:], sample_digest(steps[0], tokens)]
    assert step_digest(wrong) != step_digest(told)
    assert step_digest(told[::-1]) == step_digest(told)


@pytest.mark.parametrize(
    ("count", "most", "expected"), [(3, None, 3), (3, 5, 3), (100, 7, 7), (9, 1, 1), (9, 0, 0)]
)
def test_steps_are_spread(count, most, expected):
    records = [StepRecord(1, step, step, 1) for step in range(count)]
    chosen = spread(records, most)
    assert len(chosen) == expected
    if expected > 1:
        assert (chosen[0], chosen[-1]) == (records[0], records[-1])
