"""Finished parts to one token file: data concatenated and digested, index written piece by piece in bounded
memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmtrain.corpus.preparation.parts import PartResult, part_file
from llmtrain.corpus.prepared import SplitInfo
from llmtrain.corpus.token_file import CODES, HEAD, MAGIC

CHUNK = 1 << 22


def merge_split(work: Path, folder: Path, split: str, parts: Sequence[PartResult], dtype: str) -> SplitInfo:
    """Write `<folder>/<split>.bin` and `.idx` from the parts in `work`, durable on return; raises OSError."""
    data = folder / f"{split}.bin"
    with data.open("wb") as stream:
        writer = _DigestingWriter(stream)
        for number in range(len(parts)):
            _append(writer, part_file(work, number, split, "bin"))
        bin_sha256 = writer.finish()
    lengths = [part_file(work, number, split, "len") for number in range(len(parts))]
    with data.with_suffix(".idx").open("wb") as stream:
        writer = _DigestingWriter(stream)
        documents = write_index(writer, lengths, dtype)
        idx_sha256 = writer.finish()
    return SplitInfo(
        tokens=sum(part.tokens[split] for part in parts),
        documents=documents,
        dtype=dtype,
        max_token=max((part.max_token[split] for part in parts), default=-1),
        bin_sha256=bin_sha256,
        idx_sha256=idx_sha256,
    )


class _DigestingWriter:
    """A stream that digests what it writes."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        self.digest.update(content)
        self.stream.write(content)

    def finish(self) -> str:
        """Make the file durable and return its SHA-256."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        return self.digest.hexdigest()


def write_index(writer: _DigestingWriter, lengths: Sequence[Path], dtype: str) -> int:
    """Write an index over files of signed lengths; return the number of documents."""
    sequences = documents = 0
    for block in _blocks(lengths):
        sequences += len(block)
        documents += int((block < 0).sum())
    writer.write(HEAD.pack(MAGIC, 1, CODES[dtype], sequences, documents + 1))
    for block in _blocks(lengths):
        writer.write(np.abs(block).astype("<i4").tobytes())
    item, position = np.dtype(dtype).itemsize, 0
    for block in _blocks(lengths):
        ends = position + np.cumsum(np.abs(block))
        starts = ends - np.abs(block)
        writer.write((starts * item).astype("<i8").tobytes())
        position = int(ends[-1])
    writer.write(np.zeros(1, "<i8").tobytes())
    first = 0
    for block in _blocks(lengths):
        writer.write((first + 1 + np.flatnonzero(block < 0)).astype("<i8").tobytes())
        first += len(block)
    return documents


def _blocks(lengths: Sequence[Path]) -> Iterator[NDArray[np.int64]]:
    for path in lengths:
        with path.open("rb") as stream:
            while content := stream.read(CHUNK):
                yield np.frombuffer(content, np.int64)


def _append(writer: _DigestingWriter, path: Path) -> None:
    with path.open("rb", buffering=0) as stream:
        while content := stream.read(CHUNK):
            writer.write(content)
