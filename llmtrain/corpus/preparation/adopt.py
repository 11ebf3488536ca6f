"""Using a Megatron-LM corpus where it lies: it is read once, to check it; nothing is copied.

Its documents are not shuffled into splits, because that would mean rewriting it: the last ones are held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmtrain.config.codec import canonical_json
from llmtrain.corpus.preparation.sources import as_input
from llmtrain.corpus.prepared import (
    MANIFEST,
    CorpusManifest,
    SourceInfo,
    SplitInfo,
    TokenizerInfo,
    file_sha256,
    manifest_document,
)
from llmtrain.corpus.progress import Progress, Report
from llmtrain.corpus.token_file import TokenFile, read_head, token_paths
from llmtrain.corpus.tokenizer import load_tokenizer
from llmtrain.errors import InputError, UsageError
from llmtrain.resources import user_path
from llmtrain.run.atomic import sync_folder, write_json

CHUNK = 1 << 22
"""Tokens read at a time."""


def is_indexed(source: str) -> bool:
    """Whether a source is the prefix (or either file) of an indexed corpus."""
    path = user_path(source)
    if not path.name:
        return False
    data, index = token_paths(path)
    return data.is_file() and index.is_file()


@dataclass(frozen=True, slots=True)
class Adoption:
    """An indexed corpus to be checked and described."""

    prefix: Path
    """Absolute, without suffix."""
    tokenizer: TokenizerInfo
    validation_fraction: float

    @property
    def address(self) -> str:
        """From place, size and time of both files: reading terabytes at every launch would take hours."""
        states = [path.stat() for path in token_paths(self.prefix)]
        decisive = {
            "prefix": str(self.prefix),
            "files": [[state.st_size, state.st_mtime_ns] for state in states],
            "tokenizer": self.tokenizer.digest,
            "validation_fraction": self.validation_fraction,
        }
        return hashlib.sha256(canonical_json(decisive).encode("ascii")).hexdigest()

    def make(self, folder: Path, workers: int, report: Report) -> None:
        """Read all tokens once and write the manifest; raises UsageError, CorpusError, OSError."""
        del workers  # one sequential read is as fast as the disk
        address = self.address
        with as_input():
            splits, bin_sha256 = self._check(report)
        self._write(folder, address, splits, bin_sha256)

    def _check(self, report: Report) -> tuple[list[SplitInfo], str]:
        """Both splits, and the digest of all tokens; raises UsageError, CorpusError, OSError."""
        data, index = token_paths(self.prefix)
        total = data.stat().st_size
        first, held_out = _split(TokenFile.open(self.prefix), self.validation_fraction)
        idx_sha256 = file_sha256(index)
        digest = hashlib.sha256()
        splits: list[SplitInfo] = []
        done = 0

        def advance(read: int) -> None:
            nonlocal done
            done += read
            report(Progress("check", done, total))

        for begin, count in ((0, first), (first, held_out)):
            tokens = TokenFile.open(self.prefix, begin, count)
            highest = _scan(tokens, self.tokenizer, digest, advance)
            tokens.close()
            splits.append(
                SplitInfo(
                    tokens=tokens.tokens,
                    documents=count,
                    dtype=tokens.dtype.name,
                    max_token=highest,
                    bin_sha256="",
                    idx_sha256=idx_sha256,
                    prefix=str(self.prefix),
                    first_document=begin,
                )
            )
        return splits, digest.hexdigest()

    def _write(self, folder: Path, address: str, splits: list[SplitInfo], bin_sha256: str) -> None:
        train, validation = (replace(split, bin_sha256=bin_sha256) for split in splits)
        data, _ = token_paths(self.prefix)
        source = SourceInfo(source=str(self.prefix), files=2, bytes=data.stat().st_size, digest=bin_sha256)
        manifest = CorpusManifest(
            address=address,
            tokenizer=self.tokenizer,
            validation_fraction=self.validation_fraction,
            sources=(source,),
            empty_documents=0,
            undecodable_files=0,
            train=train,
            validation=validation,
        )
        work = folder.with_name(f".{folder.name}.tmp")
        write_json(work / MANIFEST, manifest_document(manifest))
        work.rename(folder)
        sync_folder(folder.parent)


def adoption(source: str, tokenizer_name: str, validation_fraction: float) -> Adoption:
    """Describe what is to be adopted; raises UsageError for a wrong tokenizer, InputError for a torn
    index."""
    data, index = token_paths(user_path(source).resolve())
    with as_input():
        read_head(index)
    return Adoption(data.with_suffix(""), load_tokenizer(tokenizer_name).info, validation_fraction)


def _split(tokens: TokenFile, validation_fraction: float) -> tuple[int, int]:
    """Documents to train on, and documents held out: as few of the last ones as make up the fraction of
    tokens."""
    tokens.close()
    if not validation_fraction or not tokens.documents:
        return tokens.documents, 0
    bounds = tokens.document_bounds()
    wanted = tokens.tokens * (1 - validation_fraction)
    first = max(1, int(np.searchsorted(bounds, wanted, side="right")) - 1)
    return first, tokens.documents - first


def _scan(
    tokens: TokenFile, tokenizer: TokenizerInfo, digest: hashlib._Hash, advance: Callable[[int], None]
) -> int:
    """Highest token id, -1 without any; raises UsageError for one that the tokenizer does not have."""
    highest = -1
    for first in range(0, tokens.tokens, CHUNK):
        block = tokens.read(first, min(CHUNK, tokens.tokens - first))
        digest.update(block.data)
        low, high = int(block.min()), int(block.max())
        if low < 0:
            raise InputError(f"holds the negative token id {low}", where=str(tokens.path))
        if high >= tokenizer.vocab:
            raise UsageError(
                f"holds token id {high}, but tokenizer {tokenizer.name} has {tokenizer.vocab} tokens",
                where=str(tokens.path),
                hint="name the tokenizer that the corpus was made with (data.tokenizer, --tokenizer)",
            )
        highest = max(highest, high)
        advance(block.nbytes)
    return highest
