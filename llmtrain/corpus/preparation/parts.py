"""One part of a corpus: tokenised by itself, durable on its own, so that a killed preparation goes on where
it was."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmtrain.corpus.preparation.documents import Section, read_sections
from llmtrain.corpus.preparation.sources import FileRange
from llmtrain.corpus.prepared import TRAIN, VALIDATION
from llmtrain.corpus.token_file import token_dtype
from llmtrain.corpus.tokenizer import Tokenizer
from llmtrain.errors import CorpusError, InputError
from llmtrain.run.atomic import write_json

BATCH_CHARACTERS = 1 << 20
"""Text given to the tokenizer at a time."""
LONGEST_SEQUENCE = (1 << 31) - 1
"""The index keeps lengths in 32 bits."""


@dataclass(frozen=True, slots=True)
class PartResult:
    """Counts of one finished part."""

    tokens: dict[str, int]
    """Per split."""
    max_token: dict[str, int]
    empty_documents: int
    undecodable_files: int


def part_file(work: Path, number: int, split: str, suffix: str) -> Path:
    """`bin`: tokens; `len`: i64 lengths of sequences, negative for one that ends a document."""
    return work / f"part-{number:06d}.{split}.{suffix}"


def finished_part(work: Path, number: int) -> PartResult | None:
    """Result of a part that is wholly there, None when it must be made (again)."""
    try:
        document = json.loads((work / f"part-{number:06d}.json").read_bytes())
        sizes: dict[str, int] = document.pop("sizes")
        if any((work / name).stat().st_size != size for name, size in sizes.items()):
            return None
        return PartResult(**document)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_part(
    work: Path,
    number: int,
    ranges: Sequence[FileRange],
    *,
    tokenizer: Tokenizer,
    validation_fraction: float,
    progress: Callable[[int], None] = lambda _: None,
) -> PartResult:
    """Tokenise one part into `work`; calls `progress` with the input bytes done since the last call.

    Raises UsageError for a malformed input line, CorpusError when an input cannot be read or the disk is
    full.
    """
    writers = {split: _SplitWriter(work, number, split, tokenizer) for split in (TRAIN, VALIDATION)}
    try:
        try:
            counts = _fill(writers, ranges, tokenizer, validation_fraction, progress)
            sizes = dict(pair for writer in writers.values() for pair in writer.finish())
        finally:
            for writer in writers.values():
                writer.stream.close()
        result = PartResult(
            {split: writer.tokens for split, writer in writers.items()},
            {split: writer.max_token for split, writer in writers.items()},
            counts.empty,
            len(counts.undecodable),
        )
        body = {name: getattr(result, name) for name in PartResult.__slots__}
        write_json(work / f"part-{number:06d}.json", {**body, "sizes": sizes})
    except OSError as error:
        where = str(error.filename or work)
        raise CorpusError(f"cannot prepare: {error.strerror}", where=where) from error
    return result


class _SplitWriter:
    """Tokens of one split of one part, as they come."""

    def __init__(self, work: Path, number: int, split: str, tokenizer: Tokenizer) -> None:
        self.data = part_file(work, number, split, "bin")
        self.lengths_path = part_file(work, number, split, "len")
        self.dtype = np.dtype(token_dtype(tokenizer.info.vocab))
        self.vocab = tokenizer.info.vocab
        self.separator = np.array([tokenizer.info.separator], self.dtype).tobytes()
        self.stream: BinaryIO = self.data.open("wb")
        self.lengths = array("q")
        self.tokens = 0
        self.max_token = -1

    def add(self, ids: NDArray[Any]) -> None:
        """Append a sequence."""
        if not len(ids):
            return
        if len(ids) >= LONGEST_SEQUENCE:
            raise InputError(f"one document has {len(ids)} tokens; at most 2^31 - 2 can be stored")
        highest = int(ids.max())
        if highest >= self.vocab:
            raise CorpusError(f"the tokenizer gave token id {highest}, beyond its vocabulary of {self.vocab}")
        self.max_token = max(self.max_token, highest)
        self.stream.write(ids.astype(self.dtype, copy=False).data)
        self.lengths.append(len(ids))
        self.tokens += len(ids)

    def end_document(self) -> None:
        """Append the separator to the last sequence and mark it as the document's end."""
        if not self.lengths or self.lengths[-1] < 0:
            return
        self.stream.write(self.separator)
        self.lengths[-1] = -(self.lengths[-1] + 1)
        self.tokens += 1
        self.max_token = max(self.max_token, int.from_bytes(self.separator, "little"))

    def finish(self) -> Iterator[tuple[str, int]]:
        """Make both files durable; yield their names and sizes."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        yield self.data.name, self.tokens * self.dtype.itemsize
        with self.lengths_path.open("wb") as stream:
            self.lengths.tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
        yield self.lengths_path.name, len(self.lengths) * self.lengths.itemsize


@dataclass(slots=True)
class _Counts:
    empty: int
    undecodable: set[str]


def _fill(
    writers: dict[str, _SplitWriter],
    ranges: Sequence[FileRange],
    tokenizer: Tokenizer,
    validation_fraction: float,
    progress: Callable[[int], None],
) -> _Counts:
    counts = _Counts(0, set())
    current: _SplitWriter | None = None
    for batch, read in _batches(ranges, counts):
        for section, ids in zip(batch, tokenizer.encode([section.text for section in batch]), strict=True):
            chosen = writers[split_of(section.text, validation_fraction)]
            if current is not None and current is not chosen:
                current.end_document()
            chosen.add(ids)
            current = chosen
            if section.ends_document:
                chosen.end_document()
                current = None
        progress(read)
    return counts


def _batches(ranges: Sequence[FileRange], counts: _Counts) -> Iterator[tuple[list[Section], int]]:
    """Sections in batches of bounded size, each with about the input bytes read for it; exact in the sum."""
    batch: list[Section] = []
    characters = read = 0
    total = sum(part.end - part.begin for part in ranges)
    for part in ranges:
        for section in read_sections(part):
            if section.undecodable:
                counts.undecodable.add(part.file.name)
            if not section.text:
                counts.empty += 1
                continue
            batch.append(section)
            characters += len(section.text)
            if characters >= BATCH_CHARACTERS:
                step = min(characters, total - read)
                yield batch, step
                batch, characters, read = [], 0, read + step
    yield batch, total - read


def split_of(text: str, validation_fraction: float) -> str:
    """Split of a section: by the hash of its text, so that equal texts never lie on both sides."""
    if not validation_fraction:
        return TRAIN
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return VALIDATION if int.from_bytes(digest, "big") < validation_fraction * 2.0**64 else TRAIN
