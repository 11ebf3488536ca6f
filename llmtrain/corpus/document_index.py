"""Where documents begin, looked up without reading the whole index: for corpora of 10^9 documents.

One position in `stride` is kept in memory; the others are read when asked for. A file that is cut off while
it is used is an error with its name, which is why it is read and not mapped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmtrain.corpus.token_file import HEAD, TokenFile, open_file, read_at
from llmtrain.errors import CorpusError

KEPT = 1 << 15
"""Positions kept in memory."""
FEWEST = 64
"""Positions read at a time: one system call costs more than a few positions too many."""
SPREAD = 16
"""Sequences a document up to which the pointers of all are read at once."""


class Bounds(Protocol):
    """Increasing positions at which documents begin, and the end."""

    documents: int

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Positions of some consecutive documents, first + count <= documents + 1; raises CorpusError."""
        ...


class DocumentIndex:
    """Documents by token position."""

    def __init__(self, bounds: Bounds) -> None:
        """Reads KEPT positions; raises CorpusError."""
        self._bounds = bounds
        self._stride = max(1, -(-bounds.documents // KEPT))
        places = range(0, bounds.documents + 1, self._stride)
        if self._stride == 1:
            self._kept = bounds.read(0, bounds.documents + 1)
        else:
            self._kept = np.array([int(bounds.read(place, 1)[0]) for place in places], np.int64)

    def covering(self, first: int, end: int) -> tuple[int, NDArray[np.int64]]:
        """Number of the last document that begins at or before token `first`, and the positions of it and of
        all that follow up to the first one at or after `end`, or to the end of the corpus."""
        block = max(0, int(np.searchsorted(self._kept, first, side="right")) - 1)
        start = block * self._stride
        positions = self._block(start)
        skipped = max(0, int(np.searchsorted(positions, first, side="right")) - 1)
        positions, number = positions[skipped:], start + skipped
        while positions[-1] < end and number + len(positions) <= self._bounds.documents:
            positions = np.concatenate((positions, self._block(number + len(positions))))
        stop = int(np.searchsorted(positions, end, side="left")) + 1
        return number, positions[:stop]

    def begins(self, first: int, end: int) -> NDArray[np.int64]:
        """Different positions, first < position < end, at which documents begin, relative to `first`."""
        _, positions = self.covering(first, end)
        found: NDArray[np.int64] = np.unique(positions[(positions > first) & (positions < end)]) - first
        return found

    def _block(self, start: int) -> NDArray[np.int64]:
        count = min(max(self._stride, FEWEST), self._bounds.documents + 1 - start)
        if self._stride == 1:
            return self._kept[start:]
        return self._bounds.read(start, count)


class TokenFileBounds:
    """Document bounds of a token file."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens, self.documents = tokens, tokens.documents
        self._path = tokens.path.with_suffix(".idx")
        self._descriptor = open_file(self._path)

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """See `Bounds.read`."""
        sequences = self._tokens.head.sequences
        place = HEAD.size + 12 * sequences + 8 * (self._tokens.first_document + first)
        content = read_at(self._path, self._descriptor, place, 8 * count)
        bounds = np.frombuffer(content, "<i8").astype(np.int64)
        if bool(np.any((bounds < 0) | (bounds > sequences) | (np.diff(bounds, prepend=0) < 0))):
            raise CorpusError("has document bounds outside its sequences", where=str(self._path))
        return self._positions(bounds) - self._tokens.first_token

    def _positions(self, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token positions of some sequences, the one after the last included."""
        head = self._tokens.head
        positions = np.full(len(bounds), head.tokens, np.int64)
        inside = bounds < head.sequences
        if inside.any():
            low, high = int(bounds[inside][0]), int(bounds[inside][-1])
            if high - low <= SPREAD * len(bounds):
                positions[inside] = self._pointers(low, high - low + 1)[bounds[inside] - low]
            else:  # Documents of very many sequences.
                positions[inside] = [self._pointers(int(bound), 1)[0] for bound in bounds[inside]]
        return positions

    def _pointers(self, first: int, count: int) -> NDArray[np.int64]:
        head = self._tokens.head
        place = HEAD.size + 4 * head.sequences + 8 * first
        content = read_at(self._path, self._descriptor, place, 8 * count)
        found: NDArray[np.int64] = np.frombuffer(content, "<i8").astype(np.int64) // head.dtype.itemsize
        return found


class DocumentTokens:
    """A token file whose documents count."""

    def __init__(self, tokens: TokenFile) -> None:
        """Raises CorpusError."""
        self._tokens, self._index = tokens, DocumentIndex(TokenFileBounds(tokens))
        self.path = tokens.path

    def windows(self, sequence: int) -> int:
        """See `TokenFile.windows`."""
        return self._tokens.windows(sequence)

    def window(self, index: int, sequence: int) -> NDArray[np.int64]:
        """See `TokenFile.window`."""
        return self._tokens.window(index, sequence)

    def begins(self, index: int, sequence: int) -> NDArray[np.int64]:
        """Places 1..sequence of a window's tokens at which a document begins, increasing."""
        first = index * sequence
        return self._index.begins(first, first + sequence + 1)
