"""Blends: proportions exact in every prefix, every corpus with epochs of its own, and one order for all
layouts."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmtrain.config.batch_ramp import BatchRamp
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig
from llmtrain.corpus.blend import LONGEST_PERIOD, Blend, quotas
from llmtrain.corpus.samples import Samples, step_digest

DEGREES = (1, 2, 3, 4, 5, 7, 8)


class Numbered:
    """Windows whose tokens say which corpus and window they are."""

    def __init__(self, corpus: int, count: int) -> None:
        self.corpus, self.count = corpus, count

    def windows(self, sequence: int) -> int:
        return self.count

    def window(self, index: int, sequence: int) -> np.ndarray:
        return np.array([self.corpus, index, *range(sequence - 1)], np.int64)

    def begins(self, index: int, sequence: int) -> np.ndarray:
        return np.arange(1 + index % 3, sequence + 1, 3)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 400), min_size=1, max_size=12), start=st.integers(0, 10**15))
def test_every_prefix_is_in_proportion(weights, start):
    blend, total, seen = Blend(weights), sum(weights), [0] * len(weights)
    for sample in range(2 * blend.period + 1 if blend.period < 1000 else 2000):
        corpus, rank = blend.place(sample)
        assert rank == seen[corpus]
        seen[corpus] += 1
        for count, weight in zip(seen, weights, strict=True):
            assert abs(count * total - (sample + 1) * weight) < total
    counts = blend.counts(start)
    assert sum(counts) == start
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count * total - start * weight) < total
    corpus, rank = blend.place(start)
    assert rank == counts[corpus]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((1.0,), (1,)),
        ((3, 3), (1, 1)),
        ((0.1, 0.3), (1, 3)),
        ((1e9, 1e9), (1, 1)),
    ],
)
def test_weights_count_as_they_are_written(weights, expected):
    assert quotas(weights) == expected


@given(st.lists(st.floats(1, 1e3), min_size=1, max_size=20))
def test_odd_weights_are_rounded_to_a_bounded_period(weights):
    found = quotas(weights)
    assert sum(found) <= LONGEST_PERIOD + len(weights)
    for share, weight in zip(found, weights, strict=True):
        assert share == pytest.approx(sum(found) * weight / sum(weights), abs=1.5)


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (-1.0,), (float("nan"), 1.0)])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="positive weights"):
        Blend(weights)


GOLDEN = [(0, 14), (0, 68), (0, 99), (1, 0), (0, 59), (0, 47), (1, 1), (0, 97), (0, 42), (2, 1)]
"""(corpus, window) of the first samples of a blend 7:2:1. A change here makes runs resume on other data."""


def blended(*, documents: bool = False) -> Samples:
    sources = [Numbered(0, 101), Numbered(1, 5), Numbered(2, 3)]
    known = sources if documents else None
    return Samples(sources, (0.7, 0.2, 0.1), sequence=8, seed=5, documents=known)


def test_the_order_never_changes():
    samples = blended()
    assert [samples.place(sample) for sample in range(10)] == GOLDEN


def test_every_corpus_has_epochs_of_its_own():
    samples, count = blended(), 10 * 303
    seen = Counter(samples.place(sample) for sample in range(count))
    assert {times for (corpus, _), times in seen.items() if corpus == 0} == {21}
    assert {times for (corpus, _), times in seen.items() if corpus == 2} == {101}
    times = [times for (corpus, _), times in seen.items() if corpus == 1]
    assert max(times) - min(times) <= 1
    assert sum(times) / len(times) == pytest.approx(606 / 5)


def test_corpora_of_equal_size_are_read_in_unrelated_orders():
    samples = Samples([Numbered(0, 500), Numbered(1, 500)], (1, 1), sequence=8, seed=5)
    orders = [[samples.place(2 * rank + corpus)[1] for rank in range(500)] for corpus in (0, 1)]
    assert sum(first == second for first, second in zip(*orders, strict=True)) < 8


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    start=st.integers(1, 10**9),
    documents=st.booleans(),
    ramp=st.booleans(),
)
@example(seed=0, start=1, documents=True, ramp=True)  # replicas that read a single sequence
def test_the_same_bytes_for_every_dp_and_across_changes_in_mid_epoch(seed, start, documents, ramp):
    """What replicas read in rank order is the same stream of bytes for every layout, with the same digest and
    the same number of predicted tokens."""
    pytest.importorskip("torch")
    from llmtrain.engine.data import TrainingBatches

    batch = BatchConfig(global_size=24, ramp=BatchRamp(start=8, steps=start + 2) if ramp else None)
    rng, samples = random.Random(seed), blended(documents=documents)
    layouts = [*(Layout(dp=dp) for dp in DEGREES), Layout(dp=4, micro_batch=2)]
    reference = None
    for layout in [None, *layouts]:
        tokens, targets, positions, predicted, digests = b"", b"", b"", [], []
        for step in range(start, start + 5):
            chosen = layout or rng.choice(layouts)  # None: another one at every step.
            read = [
                TrainingBatches(samples, batch, chosen, replica).fetch(step) for replica in range(chosen.dp)
            ]
            tokens += b"".join(part.tokens.numpy().tobytes() for part in read)
            targets += b"".join(part.targets.numpy().tobytes() for part in read)
            positions += b"".join(
                part.positions.numpy().tobytes() for part in read if part.positions is not None
            )
            predicted.append({part.predicted for part in read})
            digests.append(step_digest(part.digest for part in read))
        found = (tokens, targets, positions, predicted, digests)
        assert reference is None or found == reference
        reference = found
    expected = blended()
    first = batch.samples_before(start)
    assert reference[4][0] == step_digest(
        expected.read(sample).digest for sample in range(first, first + batch.at(start))
    )
