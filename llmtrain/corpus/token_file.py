"""A token file: `NAME.bin`, all tokens of all documents one after the other, and `NAME.idx`, where they
begin.

The format is Megatron-LM's indexed dataset, so that existing corpora work unchanged: the index is
MMIDIDX and two zero bytes, version (u64, 1), dtype code (u8), number of sequences and of document bounds (u64
each), then lengths (i32, tokens), pointers (i64, bytes) and document bounds (i64, sequences), all
little-endian; the data is raw. Training cuts the stream into windows regardless of documents.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.errors import CorpusError

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""numpy dtype of every integer dtype code of the format."""
CODES: dict[str, int] = {"uint8": 1, "uint16": 8, "int32": 4}
"""Codes of the dtypes that are written."""
READ_TRIES = 4
FIRST_WAIT = 0.1
"""Seconds before the second try; doubled after each."""


def token_dtype(vocab: int) -> str:
    """Smallest dtype, of those that Megatron-LM reads, for token ids 0..vocab-1; raises ValueError beyond
    2^31."""
    if not 1 <= vocab <= 1 << 31:
        raise ValueError(f"a vocabulary of {vocab} tokens cannot be stored")
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "int32"


@dataclass(frozen=True, slots=True)
class TokenFile:
    """An open token file; reads are positional, so that threads may share it."""

    path: Path
    """The `.bin` file."""
    dtype: np.dtype[Any]
    tokens: int
    sequences: int
    documents: int
    descriptor: int

    @staticmethod
    def open(path: Path) -> TokenFile:
        """Open `NAME.bin` (or `NAME`, without suffix) and check magic, version, dtype and both lengths.

        Raises CorpusError that names the file and the fault. The tokens themselves are not read.
        """
        data = path if path.suffix == ".bin" else path.with_name(path.name + ".bin")
        index = data.with_suffix(".idx")
        dtype, sequences, documents, tokens = _read_head(index)
        descriptor = _open(data)
        size = os.fstat(descriptor).st_size
        if size != tokens * dtype.itemsize:
            os.close(descriptor)
            raise CorpusError(
                f"has {size} bytes, its index says {tokens * dtype.itemsize}: it is not whole",
                where=str(data),
                hint="prepare the corpus again",
            )
        return TokenFile(data, dtype, tokens, sequences, documents, descriptor)

    def close(self) -> None:
        """Close the file; it cannot be read any more."""
        os.close(self.descriptor)

    def windows(self, sequence: int) -> int:
        """Number of windows of `sequence` inputs and as many targets; neighbours share one token."""
        return max(0, (self.tokens - 1) // sequence)

    def window(self, index: int, sequence: int) -> NDArray[np.int64]:
        """Return tokens [sequence + 1] of a window: inputs are all but the last, targets all but the first.

        Raises IndexError outside 0..windows-1, CorpusError when the file cannot be read, after a bounded
        number of tries.
        """
        if not 0 <= index < self.windows(sequence):
            raise IndexError(f"window {index} is outside 0..{self.windows(sequence) - 1}")
        return self.read(index * sequence, sequence + 1).astype(np.int64)

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Return `count` tokens from position `first` in the file's own dtype; raises CorpusError."""
        begin, size = first * self.dtype.itemsize, count * self.dtype.itemsize
        wait = FIRST_WAIT
        for tried in range(1, READ_TRIES + 1):
            try:
                content = _read_all(self.descriptor, begin, size)
            except OSError as error:
                if tried == READ_TRIES:
                    raise CorpusError(
                        f"cannot be read after {READ_TRIES} tries: {error.strerror}", where=str(self.path)
                    ) from error
                time.sleep(wait)
                wait *= 2
            else:
                break
        if len(content) != size:
            raise CorpusError(
                f"ends at byte {begin + len(content)}, before its index does", where=str(self.path)
            )
        return np.frombuffer(content, self.dtype)

    def document_bounds(self) -> NDArray[np.int64]:
        """Token positions [documents + 1] at which documents begin, and the end; read whole: 8 bytes a
        document."""
        index, count = self.path.with_suffix(".idx"), self.sequences
        pointers = np.fromfile(index, "<i8", count, offset=HEAD.size + 4 * count)
        bounds = np.fromfile(index, "<i8", self.documents + 1, offset=HEAD.size + 12 * count)
        starts = np.append(pointers // self.dtype.itemsize, self.tokens).astype(np.int64)
        if len(bounds) != self.documents + 1 or bool(np.any((bounds < 0) | (bounds > count))):
            raise CorpusError("has document bounds outside its sequences", where=str(index))
        found: NDArray[np.int64] = starts[bounds]
        return found


def _read_head(index: Path) -> tuple[np.dtype[Any], int, int, int]:
    """Return (dtype, sequences, documents, tokens) of an index whose length is right."""
    descriptor = _open(index)
    try:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, HEAD.size, 0)
        if len(head) < HEAD.size or head[:9] != MAGIC:
            raise CorpusError("is not an index of a token file (magic MMIDIDX)", where=str(index))
        _, version, code, sequences, bounds = HEAD.unpack(head)
        if version != 1 or code not in DTYPES:
            raise CorpusError(
                f"has version {version} and dtype code {code}, which cannot be read", where=str(index)
            )
        expected = HEAD.size + 12 * sequences + 8 * bounds
        if size not in (
            expected,
            expected + sequences,
        ):  # Megatron-LM may append one byte a sequence: its mode
            raise CorpusError(f"has {size} bytes instead of {expected}: it was cut off", where=str(index))
        dtype = np.dtype(DTYPES[code])
        return dtype, sequences, max(0, bounds - 1), _tokens(descriptor, index, sequences, dtype.itemsize)
    finally:
        os.close(descriptor)


def _tokens(descriptor: int, index: Path, sequences: int, item: int) -> int:
    """Tokens in the data file, from the last sequence's pointer and length."""
    if not sequences:
        return 0
    (length,) = struct.unpack("<i", os.pread(descriptor, 4, HEAD.size + 4 * (sequences - 1)))
    (pointer,) = struct.unpack("<q", os.pread(descriptor, 8, HEAD.size + 4 * sequences + 8 * (sequences - 1)))
    if length < 0 or pointer < 0 or pointer % item:
        raise CorpusError("has a last sequence of impossible place or length", where=str(index))
    return int(pointer // item + length)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CorpusError("missing", where=str(path), hint="prepare the corpus again") from error
    except OSError as error:
        raise CorpusError(f"cannot be opened: {error.strerror}", where=str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorpusError("is not a file", where=str(path))
    return descriptor


def _read_all(descriptor: int, begin: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    content = os.pread(descriptor, size, begin)
    while len(content) < size:
        more = os.pread(descriptor, size - len(content), begin + len(content))
        if not more:
            break
        content += more
    return content
