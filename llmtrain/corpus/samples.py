"""The samples of a training: from a global sample index to tokens, over one corpus or a blend of several.

A pure function of (seed, sample): the blend says which corpus a sample comes from and how many of that corpus
came before it (`blend.py`), and the order of that corpus, with its own epochs, says which window it is
(`sampling.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmtrain.corpus.blend import Blend
from llmtrain.corpus.sampling import SampleOrder, mix

DIGEST_BITS = 40
"""Of a step's digest: the sum over 2^13 ranks is still exact in a 64-bit float."""
DIGEST_MASK = (1 << DIGEST_BITS) - 1


class Windows(Protocol):
    """One corpus as windows: a token file (`token_file.py`) or one whose documents are seen in another order
    (`document_order.py`)."""

    def windows(self, sequence: int) -> int:
        """Number of windows of sequence + 1 tokens."""
        ...

    def window(self, index: int, sequence: int) -> NDArray[np.int64]:
        """Tokens of one window, [sequence + 1] int64."""
        ...


@runtime_checkable
class DocumentWindows(Windows, Protocol):
    """Windows that know where documents begin."""

    def begins(self, index: int, sequence: int) -> NDArray[np.int64]:
        """Places 1..sequence of a window's tokens at which a document begins, increasing."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as it was read."""

    tokens: NDArray[np.int64]
    """[sequence + 1]: inputs are all but the last, targets all but the first."""
    begins: NDArray[np.int64] | None
    """Places 1..sequence at which a document begins; None when documents do not count."""
    digest: int
    """Of its index and its tokens, in 0..DIGEST_MASK."""


class Samples:
    """All samples of a training, in the order of training."""

    def __init__(
        self,
        sources: Sequence[Windows],
        weights: Sequence[float] = (1.0,),
        *,
        sequence: int,
        seed: int,
        documents: Sequence[DocumentWindows] | None = None,
    ) -> None:
        """`documents` are the same sources where documents count. Raises ValueError when one has no
        window."""
        self._sources, self._documents, self.sequence = list(sources), documents, sequence
        self.reading = ""
        """File that is being read, or was last."""
        self._blend = Blend(weights) if len(sources) > 1 else None
        self._orders = [
            SampleOrder(source.windows(sequence), seed_of(seed, at)) for at, source in enumerate(sources)
        ]

    def place(self, sample: int) -> tuple[int, int]:
        """Corpus and window of a global sample."""
        corpus, rank = self._blend.place(sample) if self._blend is not None else (0, sample)
        return corpus, self._orders[corpus].window(rank)

    def read(self, sample: int) -> Sample:
        """Read one sample; raises CorpusError naming the file that cannot be read."""
        corpus, window = self.place(sample)
        self.reading = str(getattr(self._sources[corpus], "path", ""))
        tokens = self._sources[corpus].window(window, self.sequence)
        begins = None if self._documents is None else self._documents[corpus].begins(window, self.sequence)
        return Sample(tokens, begins, sample_digest(sample, tokens))

    def predicted(self, first: int, count: int) -> int:
        """Tokens that are predicted in some consecutive samples: all targets but documents' first tokens."""
        targets = count * self.sequence
        if self._documents is None:
            return targets
        for sample in range(first, first + count):
            corpus, window = self.place(sample)
            targets -= len(self._documents[corpus].begins(window, self.sequence))
        return targets


def seed_of(seed: int, corpus: int) -> int:
    """Seed of one corpus's order: of the first one the training's own, of others unrelated to it."""
    return seed if not corpus else mix(mix(seed) ^ corpus)


def sample_digest(sample: int, tokens: NDArray[np.int64]) -> int:
    """Digest of a sample's index and tokens: no cryptography, but by chance nothing goes wrong unseen."""
    return mix(mix(sample) ^ zlib.crc32(tokens.astype("<i4").data)) & DIGEST_MASK


def step_digest(digests: Iterable[int]) -> int:
    """Digest of a step: the sum of its samples', whichever ranks read them."""
    return sum(digests) & DIGEST_MASK
