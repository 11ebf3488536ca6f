"""Sources to token files: parts, in parallel, then merged, then one rename.

The folder of an unfinished preparation is kept, so that the next one goes on with the parts that are missing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.codec import canonical_json
from llmtrain.corpus.preparation.merge import merge_split
from llmtrain.corpus.preparation.parts import PartResult, finished_part, make_part
from llmtrain.corpus.preparation.sources import FileRange, cut_into_parts, describe, find_files
from llmtrain.corpus.preparation.workers import make_parts
from llmtrain.corpus.prepared import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    CorpusManifest,
    SourceInfo,
    manifest_document,
)
from llmtrain.corpus.progress import Progress, Report
from llmtrain.corpus.token_file import token_dtype
from llmtrain.corpus.tokenizer import Tokenizer, load_tokenizer
from llmtrain.errors import InputError, UsageError
from llmtrain.run.atomic import sync_folder, write_atomic, write_json

FORMAT = 1
"""Part of every address: raised when the same sources would give other token files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokeniseJob:
    """Everything that decides what one preparation writes."""

    address: str
    sources: tuple[SourceInfo, ...]
    parts: tuple[tuple[FileRange, ...], ...]
    validation_fraction: float
    tokenizer: Tokenizer
    tokenizer_name: str

    @property
    def input_bytes(self) -> int:
        """Bytes of all sources."""
        return sum(source.bytes for source in self.sources)

    def make(self, folder: Path, workers: int, report: Report) -> None:
        """Write the corpus; the folder appears whole or not at all. Raises UsageError, CorpusError,
        OSError."""
        _make(self, folder, workers, report)


def tokenise_job(sources: Sequence[str], tokenizer_name: str, validation_fraction: float) -> TokeniseJob:
    """Find and digest the sources; raises UsageError, and CorpusError when one cannot be read."""
    tokenizer = load_tokenizer(tokenizer_name)
    listed = [(source, find_files(source)) for source in sources]
    described = tuple(describe(source, files) for source, files in listed)
    decisive = {
        "format": FORMAT,
        "sources": [source.digest for source in described],
        "tokenizer": tokenizer.info.digest,
        "validation_fraction": validation_fraction,
    }
    return TokeniseJob(
        address=hashlib.sha256(canonical_json(decisive).encode("ascii")).hexdigest(),
        sources=described,
        parts=tuple(cut_into_parts(file for _, files in listed for file in files)),
        validation_fraction=validation_fraction,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer_name,
    )


def _make(job: TokeniseJob, folder: Path, workers: int, report: Report) -> None:
    """Tokenise what is missing, merge, and rename into place."""
    work = folder.with_name(f".{folder.name}.tmp")
    _open_work(work, job.address)
    try:
        results = _tokenise(job, work, workers, report)
    except (UsageError, InputError):
        shutil.rmtree(work, ignore_errors=True)  # Other sources have another address: nobody goes on with it.
        raise
    report(Progress("merge", job.input_bytes, job.input_bytes))
    finished = work / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    dtype = token_dtype(job.tokenizer.info.vocab)
    splits = {split: merge_split(work, finished, split, results, dtype) for split in (TRAIN, VALIDATION)}
    if not splits[TRAIN].tokens:
        shutil.rmtree(work)
        raise UsageError("holds no text", where=", ".join(source.source for source in job.sources))
    manifest = CorpusManifest(
        address=job.address,
        tokenizer=job.tokenizer.info,
        validation_fraction=job.validation_fraction,
        sources=job.sources,
        empty_documents=sum(result.empty_documents for result in results),
        undecodable_files=sum(result.undecodable_files for result in results),
        train=splits[TRAIN],
        validation=splits[VALIDATION],
    )
    write_json(finished / MANIFEST, manifest_document(manifest))
    finished.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(work, ignore_errors=True)


def _open_work(work: Path, address: str) -> None:
    """Go on with an unfinished preparation of the same address, or begin anew."""
    note = work / "address"
    if note.is_file() and note.read_text(encoding="utf-8") == address:
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_atomic(note, address)


def _tokenise(job: TokeniseJob, work: Path, workers: int, report: Report) -> list[PartResult]:
    """Make the parts that are missing in the work folder; all of them, in order."""
    parts, total = job.parts, job.input_bytes
    results = {number: found for number in range(len(parts)) if (found := finished_part(work, number))}
    missing = [number for number in range(len(parts)) if number not in results]
    done = sum(_size(parts[number]) for number in results)

    def advance(read: int) -> None:
        nonlocal done
        done += read
        report(Progress("tokenise", done, total))

    advance(0)
    results |= dict(_made(job, work, missing, workers, advance))
    return [results[number] for number in range(len(parts))]


def _made(
    job: TokeniseJob, work: Path, missing: Sequence[int], workers: int, advance: Callable[[int], None]
) -> Iterator[tuple[int, PartResult]]:
    """Parts as they are finished, in processes where that helps; calls `advance` with input bytes."""
    fraction = job.validation_fraction
    if min(workers, len(missing)) > 1:
        for number, result in make_parts(
            work,
            job.parts,
            missing,
            tokenizer_name=job.tokenizer_name,
            validation_fraction=fraction,
            workers=workers,
        ):
            advance(_size(job.parts[number]))
            yield number, result
    else:
        for number in missing:
            result = make_part(
                work,
                number,
                job.parts[number],
                tokenizer=job.tokenizer,
                validation_fraction=fraction,
                progress=advance,
            )
            yield number, result


def _size(ranges: Sequence[FileRange]) -> int:
    """Input bytes."""
    return sum(part.end - part.begin for part in ranges)
