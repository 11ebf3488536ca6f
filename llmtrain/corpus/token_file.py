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
    """An open token file, or some consecutive documents of one; reads are positional: threads may share
    it."""

    path: Path
    """The `.bin` file."""
    dtype: np.dtype[Any]
    tokens: int
    documents: int
    first_token: int
    first_document: int
    head: IndexHead
    descriptor: int

    @staticmethod
    def open(path: Path, first_document: int = 0, documents: int | None = None) -> TokenFile:
        """Open `NAME.bin` (or `NAME`, without suffix) and check magic, version, dtype and both lengths.

        With `first_document` and `documents` only those are seen. Raises CorpusError that names the file and
        the fault. The tokens themselves are not read.
        """
        data, index = token_paths(path)
        head = read_head(index)
        count = head.documents - first_document if documents is None else documents
        if not 0 <= first_document <= first_document + count <= head.documents:
            raise CorpusError(
                f"holds {head.documents} documents, not {first_document} + {count}", where=str(index)
            )
        whole = count == head.documents
        first, end = (0, head.tokens) if whole else document_range(index, head, first_document, count)
        descriptor = open_file(data)
        size = os.fstat(descriptor).st_size
        if size != head.tokens * head.dtype.itemsize:
            os.close(descriptor)
            raise CorpusError(
                f"has {size} bytes, its index says {head.tokens * head.dtype.itemsize}: it is not whole",
                where=str(data),
                hint="prepare the corpus again",
            )
        return TokenFile(data, head.dtype, end - first, count, first, first_document, head, descriptor)

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
        begin = (self.first_token + first) * self.dtype.itemsize
        content = read_at(self.path, self.descriptor, begin, count * self.dtype.itemsize)
        return np.frombuffer(content, self.dtype)

    def document_bounds(self) -> NDArray[np.int64]:
        """Token positions [documents + 1] at which documents begin, and the end; 8 bytes a document and
        more."""
        index, sequences = self.path.with_suffix(".idx"), self.head.sequences
        place = HEAD.size + 12 * sequences + 8 * self.first_document
        bounds = np.fromfile(index, "<i8", self.documents + 1, offset=place)
        if len(bounds) != self.documents + 1 or bool(np.any((bounds < 0) | (bounds > sequences))):
            raise CorpusError("has document bounds outside its sequences", where=str(index))
        pointers = np.fromfile(index, "<i8", sequences, offset=HEAD.size + 4 * sequences)
        starts = np.append(pointers // self.dtype.itemsize, self.head.tokens).astype(np.int64)
        found: NDArray[np.int64] = starts[bounds] - self.first_token
        return found


@dataclass(frozen=True, slots=True)
class IndexHead:
    """What the first bytes of an index and its length say."""

    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int


def token_paths(path: Path) -> tuple[Path, Path]:
    """Data and index file of `NAME`, `NAME.bin` or `NAME.idx`."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def document_range(index: Path, head: IndexHead, first: int, count: int) -> tuple[int, int]:
    """Token positions [begin, end) of some consecutive documents; raises CorpusError."""
    found: list[int] = []
    descriptor = open_file(index)
    try:
        for document in (first, first + count):
            place = HEAD.size + 12 * head.sequences + 8 * document
            (sequence,) = struct.unpack("<q", os.pread(descriptor, 8, place))
            if not 0 <= sequence <= head.sequences:
                raise CorpusError("has document bounds outside its sequences", where=str(index))
            if sequence == head.sequences:
                found.append(head.tokens)
                continue
            place = HEAD.size + 4 * head.sequences + 8 * sequence
            (pointer,) = struct.unpack("<q", os.pread(descriptor, 8, place))
            found.append(pointer // head.dtype.itemsize)
    finally:
        os.close(descriptor)
    if not 0 <= found[0] <= found[1] <= head.tokens:
        raise CorpusError("has documents that are not one after the other", where=str(index))
    return found[0], found[1]


def read_head(index: Path) -> IndexHead:
    """Check an index's magic, version, dtype and length; raises CorpusError."""
    descriptor = open_file(index)
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
        tokens = _tokens(descriptor, index, sequences, dtype.itemsize)
        return IndexHead(dtype, sequences, max(0, bounds - 1), tokens)
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


def open_file(path: Path) -> int:
    """Descriptor of a file that is there and is one; raises CorpusError."""
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


def read_at(path: Path, descriptor: int, begin: int, size: int) -> bytes:
    """Bytes [begin, begin + size) of an open file; raises CorpusError when it is shorter, or cannot be read
    in READ_TRIES tries."""
    wait = FIRST_WAIT
    for tried in range(1, READ_TRIES + 1):
        try:
            content = _read_all(descriptor, begin, size)
        except OSError as error:
            if tried == READ_TRIES:
                fault = f"cannot be read after {READ_TRIES} tries: {error.strerror}"
                raise CorpusError(fault, where=str(path)) from error
            time.sleep(wait)
            wait *= 2
        else:
            break
    if len(content) != size:
        raise CorpusError(f"ends at byte {begin + len(content)}, before its index does", where=str(path))
    return content


def _read_all(descriptor: int, begin: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    content = os.pread(descriptor, size, begin)
    while len(content) < size:
        more = os.pread(descriptor, size - len(content), begin + len(content))
        if not more:
            break
        content += more
    return content
