"""A corpus whose documents are seen in an order drawn from the seed, before they are cut into windows.

Which document is the i-th is computed (`sampling.py`); where it begins in the shuffled stream is the sum of
the lengths before it, which is worked out once, in several threads, written atomically and shared by all
ranks: `order-*.ends`, 8 bytes a document. It is made while the corpus is prepared, so that no rank makes
one or waits for one. Opening it reads a few positions only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmtrain.corpus.document_index import DocumentIndex, TokenFileBounds
from llmtrain.corpus.sampling import SampleOrder, shuffled
from llmtrain.corpus.token_file import TokenFile, open_file, read_at
from llmtrain.errors import CorpusError
from llmtrain.run.atomic import sync_folder

CHUNK = 1 << 20
"""Documents that one thread places at a time."""
MAGIC = b"llmtrain document order 1\n".ljust(32, b"\0")


def order_path(storage: Path, digest: str, seed: int) -> Path:
    """Where the order of a corpus's training documents is kept."""
    return storage / f"order-{digest[:24]}-{seed}.ends"


def make_order(tokens: TokenFile, path: Path, seed: int) -> None:
    """Write the order unless it is there whole; several processes may. Raises CorpusError."""
    size = len(MAGIC) + 8 * (tokens.documents + 1)
    try:
        if path.stat().st_size == size:
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CorpusError(f"cannot be read: {error.strerror}", where=str(path)) from error
    bounds = tokens.document_bounds()
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(draft, bounds, seed)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise CorpusError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _write(draft: Path, bounds: NDArray[np.int64], seed: int) -> None:
    lengths, documents = np.diff(bounds), len(bounds) - 1
    position = 0
    with draft.open("wb") as stream, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        stream.write(MAGIC)
        stream.write(np.zeros(1, "<i8").tobytes())
        for ends in pool.map(lambda first: _ends(lengths, first, seed), range(0, documents, CHUNK)):
            stream.write((ends + position).astype("<i8").data)
            position += int(ends[-1])
        stream.flush()
        os.fsync(stream.fileno())


def _ends(lengths: NDArray[np.int64], first: int, seed: int) -> NDArray[np.int64]:
    """Ends of a chunk's documents, from its beginning."""
    places = np.arange(first, min(first + CHUNK, len(lengths)))
    found: NDArray[np.int64] = np.cumsum(lengths[shuffled(places, len(lengths), seed)])
    return found


class OrderBounds:
    """Document bounds of the shuffled stream."""

    def __init__(self, path: Path, documents: int) -> None:
        """Raises CorpusError for a file that is missing or of another corpus."""
        self.documents, self.path = documents, path
        self._descriptor = open_file(path)
        size = os.fstat(self._descriptor).st_size
        expected = len(MAGIC) + 8 * (documents + 1)
        if size != expected or read_at(path, self._descriptor, 0, len(MAGIC)) != MAGIC:
            fault = f"is not the order of {documents} documents: {size} bytes instead of {expected}"
            raise CorpusError(fault, where=str(path), hint="remove it; `llmtrain resume` makes it again")

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """See `Bounds.read`."""
        content = read_at(self.path, self._descriptor, len(MAGIC) + 8 * first, 8 * count)
        return np.frombuffer(content, "<i8").astype(np.int64)


class ShuffledDocuments:
    """A token file in the order of its shuffled documents."""

    def __init__(self, tokens: TokenFile, path: Path, seed: int) -> None:
        """Raises CorpusError."""
        self._tokens, self._originals = tokens, TokenFileBounds(tokens)
        self._bounds = OrderBounds(path, tokens.documents)
        self._index = DocumentIndex(self._bounds)
        self._order = SampleOrder(tokens.documents, seed) if tokens.documents else None

    @property
    def path(self) -> Path:
        """The `.bin` file."""
        return self._tokens.path

    def windows(self, sequence: int) -> int:
        """See `TokenFile.windows`."""
        return self._tokens.windows(sequence)

    def window(self, index: int, sequence: int) -> NDArray[np.int64]:
        """See `TokenFile.window`."""
        if not 0 <= index < self.windows(sequence):
            raise IndexError(f"window {index} is outside 0..{self.windows(sequence) - 1}")
        first = index * sequence
        return np.concatenate(list(self._pieces(first, first + sequence + 1))).astype(np.int64)

    def begins(self, index: int, sequence: int) -> NDArray[np.int64]:
        """See `DocumentTokens.begins`."""
        first = index * sequence
        return self._index.begins(first, first + sequence + 1)

    def _pieces(self, first: int, end: int) -> Iterator[NDArray[np.int64]]:
        number, positions = self._index.covering(first, end)
        if self._order is None:
            return
        for at in range(len(positions) - 1):
            low, high = max(first, int(positions[at])), min(end, int(positions[at + 1]))
            if low < high:
                original = self._originals.read(self._order.window(number + at), 2)
                if int(original[1] - original[0]) != int(positions[at + 1] - positions[at]):
                    raise CorpusError("is the order of another corpus", where=str(self._bounds.path))
                yield self._tokens.read(int(original[0]) + low - int(positions[at]), high - low)
