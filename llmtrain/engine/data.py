"""Which sequences a replica trains on: a pure function of the step, whatever the layout."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llmtrain.config.layout import Layout
from llmtrain.corpus.sampling import SampleOrder


class Windows(Protocol):
    """A token file (`corpus/token_file.py`)."""

    def windows(self, sequence: int) -> int:
        """Number of windows of sequence + 1 tokens."""
        ...

    def window(self, index: int, sequence: int) -> np.ndarray:
        """Tokens of one window, [sequence + 1] int64."""
        ...


class TrainingBatches:
    """One replica's share of every global batch."""

    def __init__(
        self, source: Windows, *, sequence: int, global_batch: int, seed: int, layout: Layout, replica: int
    ) -> None:
        """Raises ValueError when the source has no window."""
        self._source, self._sequence, self._global = source, sequence, global_batch
        self._order = SampleOrder(source.windows(sequence), seed)
        self.micro_batches = layout.micro_batches(global_batch)[replica]
        self.busiest = max(layout.micro_batches(global_batch))
        """Micro-batches of the replica that has most."""
        self._first = layout.first_sample(replica, global_batch)
        self._count = self.micro_batches * layout.micro_batch

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step, counted from 1, each [m b, s] int64 on the host."""
        first = (step - 1) * self._global + self._first
        windows = (self._order.window(sample) for sample in range(first, first + self._count))
        return _stack([self._source.window(window, self._sequence) for window in windows])


class ValidationBatches:
    """One replica's share of the validation sequences: always the same ones, dealt out in turn."""

    def __init__(
        self, source: Windows, *, sequence: int, sequences: int, layout: Layout, replica: int
    ) -> None:
        """Every replica gets as many micro-batches, so that all pass through the pipeline alike; what fills
        up the last one weighs nothing. The file may hold fewer sequences than asked for, or none."""
        self.sequences = min(sequences, source.windows(sequence))
        share = -(-self.sequences // layout.dp)
        padded = -(-share // layout.micro_batch) * layout.micro_batch
        own = range(replica, self.sequences, layout.dp)
        self.weights = torch.tensor([1.0] * len(own) + [0.0] * (padded - len(own)), dtype=torch.float64)
        self.tokens_in_all = self.sequences * sequence
        if self.sequences:
            filled = [*own, *([0] * (padded - len(own)))]
            self.tokens, self.targets = _stack([source.window(index, sequence) for index in filled])


def _stack(windows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Windows of [s + 1] -> tokens and targets, each [count, s]."""
    batch = torch.from_numpy(np.stack(windows).astype(np.int64, copy=False))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
