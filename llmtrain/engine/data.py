"""Which samples a replica trains on: a pure function of the step, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig
from llmtrain.corpus.blend import Blend
from llmtrain.corpus.samples import DocumentWindows, Samples, Windows, step_digest

NOT_PREDICTED = -1
"""Target of a token that nothing is predicted from: the last one of its document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One replica's share of a step, or of a validation pass."""

    tokens: Tensor
    """[m b, s] int64."""
    targets: Tensor
    """[m b, s] int64, some NOT_PREDICTED where documents count."""
    positions: Tensor | None
    """[m b, s] int64: place of each token in its document, as far as the sample holds it; None where
    documents do not count: its place in the sample."""
    predicted: int
    """Tokens predicted in the whole global batch."""
    digest: int = 0
    """Of this replica's samples, as they were read (`corpus/samples.py`)."""

    def loss_scale(self, micro_batch: int) -> float:
        """Factor of each micro-batch's mean over all its places that makes the sum over all micro-batches of
        the step the mean over its predicted tokens."""
        return micro_batch * self.tokens.shape[1] / max(1, self.predicted)  # Documents of one token each.

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with its tensors changed: pinned, or moved to a device."""
        return Batch(
            tokens=change(self.tokens),
            targets=change(self.targets),
            positions=None if self.positions is None else change(self.positions),
            predicted=self.predicted,
            digest=self.digest,
        )


class Batches(Protocol):
    """Where a replica's batches come from."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this replica in a global batch of the final size."""
        ...

    @property
    def busiest(self) -> int:
        """Those of the replica that has most."""
        ...

    @property
    def reading(self) -> str:
        """File that is being read, or was last."""
        ...

    def use_micro_batch(self, size: int) -> None:
        """From the next fetch on, micro-batches have another size."""
        ...

    def fetch(self, step: int) -> Batch:
        """A step's batch, on the host. Raises CorpusError naming the file that cannot be read."""
        ...


class TrainingBatches:
    """One replica's share of every global batch."""

    def __init__(self, samples: Samples, batch: BatchConfig, layout: Layout, replica: int) -> None:
        self._samples, self._batch, self._layout, self._replica = samples, batch, layout, replica
        self.micro_batches = self.busiest = 0
        self.use_micro_batch(layout.micro_batch)

    def use_micro_batch(self, size: int) -> None:
        """See `Batches.use_micro_batch`."""
        self._layout = replace(self._layout, micro_batch=size)
        counts = self._layout.micro_batches(self._batch.global_size)
        self.micro_batches, self.busiest = counts[self._replica], max(counts)

    def micro_batches_at(self, global_batch: int) -> int:
        """Micro-batches of this replica in a global batch of some size."""
        return self._layout.micro_batches(global_batch)[self._replica]

    def samples_of(self, step: int) -> range:
        """Global indices of this replica's samples of a step, counted from 1."""
        size = self._batch.at(step)
        first = self._batch.samples_before(step) + self._layout.first_sample(self._replica, size)
        return range(first, first + self.micro_batches_at(size) * self._layout.micro_batch)

    @property
    def reading(self) -> str:
        """File that is being read, or was last."""
        return self._samples.reading

    def fetch(self, step: int) -> Batch:
        """See `Batches.fetch`."""
        read = [self._samples.read(sample) for sample in self.samples_of(step)]
        first, size = self._batch.samples_before(step), self._batch.at(step)
        return _stack(
            [sample.tokens for sample in read],
            [sample.begins for sample in read],
            predicted=self._samples.predicted(first, size),
            digest=step_digest(sample.digest for sample in read),
        )


class ValidationBatches:
    """One replica's share of the validation sequences: always the same ones, dealt out in turn. Those of a
    blend are in its proportions, as far as every corpus has some."""

    def __init__(
        self,
        sources: Sequence[Windows],
        weights: Sequence[float] = (1.0,),
        *,
        sequence: int,
        sequences: int,
        layout: Layout,
        replica: int,
        documents: Sequence[DocumentWindows] | None = None,
    ) -> None:
        """Every replica gets as many micro-batches, so that all pass through the pipeline alike; what fills
        up the last one weighs nothing. The files may hold fewer sequences than asked for, or none."""
        places = _validation_places([source.windows(sequence) for source in sources], weights, sequences)
        self.sequences, self.corpora = len(places), len(sources)
        share = -(-self.sequences // layout.dp)
        padded = -(-share // layout.micro_batch) * layout.micro_batch
        own = places[replica :: layout.dp]
        self.weights = torch.tensor([1.0] * len(own) + [0.0] * (padded - len(own)), dtype=torch.float64)
        self.predicted = [0] * len(sources)
        """Tokens predicted in all replicas' sequences of each corpus."""
        for corpus, window in places:
            begins = () if documents is None else documents[corpus].begins(window, sequence)
            self.predicted[corpus] += sequence - len(begins)
        if not places:
            return
        filled = [*own, *places[:1] * (padded - len(own))]
        self.corpus_of = torch.tensor([corpus for corpus, _ in filled])
        """Corpus of each own sequence, [m b] int64."""
        self.batch = _stack(
            [sources[corpus].window(window, sequence) for corpus, window in filled],
            [None if documents is None else documents[corpus].begins(at, sequence) for corpus, at in filled],
            predicted=sum(self.predicted),
        )


def _validation_places(
    windows: Sequence[int], weights: Sequence[float], sequences: int
) -> list[tuple[int, int]]:
    """Corpus and window of every validation sequence; a corpus that has no more leaves its turn out."""
    if len(windows) == 1:
        return [(0, window) for window in range(min(sequences, windows[0]))]
    blend = Blend(weights)
    found = (blend.place(sample) for sample in range(sequences))
    return [(corpus, window) for corpus, window in found if window < windows[corpus]]


def _stack(
    windows: Sequence[NDArray[np.int64]],
    begins: Sequence[NDArray[np.int64] | None],
    *,
    predicted: int,
    digest: int = 0,
) -> Batch:
    """Windows of [s + 1] with the places where documents begin, to a batch."""
    batch = torch.from_numpy(np.stack(windows).astype(np.int64, copy=False))
    # Copies: both would be views of the same memory where there is one row, which is contiguous as it is.
    tokens, targets = batch[:, :-1].clone(), batch[:, 1:].clone()
    positions = None
    if begins[0] is not None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        for row, places in enumerate(begins):
            if places is not None and len(places):
                targets[row, torch.from_numpy(places - 1)] = NOT_PREDICTED
                positions[row] -= _document_starts(places, tokens.shape[1])
    return Batch(tokens=tokens, targets=targets, positions=positions, predicted=predicted, digest=digest)


def _document_starts(begins: NDArray[np.int64], sequence: int) -> Tensor:
    """Place at which the document of every token begins, [s]."""
    starts = np.zeros(sequence, np.int64)
    inside = begins[begins < sequence]
    starts[inside] = inside
    return torch.from_numpy(np.maximum.accumulate(starts))
