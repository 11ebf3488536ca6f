"""Preparing a corpus: sources -> parts, in parallel -> token files -> one rename.

The folder of an unfinished preparation is kept, so that the next one goes on with the parts that are missing.
Several processes may prepare the same corpus at once: one works, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.codec import canonical_json
from llmtrain.config.recipe import DataConfig
from llmtrain.corpus.merge import merge_split
from llmtrain.corpus.parts import PartResult, finished_part, make_part
from llmtrain.corpus.prepared import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    CorpusManifest,
    PreparedCorpus,
    SourceInfo,
    is_prepared,
    manifest_document,
    open_prepared,
)
from llmtrain.corpus.sources import FileRange, cut_into_parts, describe, find_files
from llmtrain.corpus.token_file import token_dtype
from llmtrain.corpus.tokenizer import Tokenizer, load_tokenizer
from llmtrain.corpus.workers import make_parts
from llmtrain.errors import CorpusError, UsageError
from llmtrain.run.atomic import sync_folder, write_atomic, write_json

FORMAT = 1
"""Part of every address: raised when the same sources would give other token files."""
POLL = 0.2
"""Seconds between two looks at a lock that another process holds."""
VERIFY_BELOW = 1 << 30
"""A corpus that is there already is read and compared with its digests when it is smaller, bytes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is."""

    phase: str
    """wait | digest | tokenise | merge"""
    done: int = 0
    """Input bytes."""
    total: int = 0


Report = Callable[[Progress], None]


def prepare(
    data: DataConfig, storage: Path, *, workers: int | None = None, progress: Report | None = None
) -> PreparedCorpus:
    """Return the corpus that a recipe's `data` names, below `storage`; made first when it is not there.

    `data.corpus` may be a folder that was prepared before; its tokenizer must then be `data.tokenizer`.
    Raises UsageError for a wrong source or tokenizer, CorpusError when it cannot be made or what is there is
    damaged.
    """
    given = Path(data.corpus).expanduser()
    if is_prepared(given):
        return _given(given, data)
    report = progress or _silent
    report(Progress("digest"))
    job = _job([data.corpus], data.tokenizer, data.validation_fraction)
    return _prepare(job, storage / f"{_slug(data.corpus)}-{job.address[:16]}", workers, report)


def prepare_folder(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "bytes",
    validation_fraction: float = 0.01,
    workers: int | None = None,
    progress: Report | None = None,
) -> PreparedCorpus:
    """Prepare some sources, in the given order, into the folder `out`; returns what is there when it is the
    same already.

    Raises UsageError when `out` holds anything else, and as `prepare` does.
    """
    report = progress or _silent
    report(Progress("digest"))
    return _prepare(_job(sources, tokenizer, validation_fraction), out, workers, report)


def _silent(_: Progress) -> None:
    pass


def _given(folder: Path, data: DataConfig) -> PreparedCorpus:
    corpus = open_prepared(folder)
    wanted = load_tokenizer(data.tokenizer).info
    if wanted.digest != corpus.manifest.tokenizer.digest:
        raise UsageError(
            f"was prepared with tokenizer {corpus.manifest.tokenizer.name}, "
            f"but data.tokenizer is {data.tokenizer}, which differs",
            where=str(folder),
            hint=f"set data.tokenizer to {corpus.manifest.tokenizer.name}, or prepare the corpus again",
        )
    return corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
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


def _job(sources: Sequence[str], tokenizer_name: str, validation_fraction: float) -> _Job:
    if not 0 <= validation_fraction < 1:
        raise UsageError(f"validation fraction must be at least 0 and below 1, not {validation_fraction}")
    tokenizer = load_tokenizer(tokenizer_name)
    listed = [(source, find_files(source)) for source in sources]
    described = tuple(describe(source, files) for source, files in listed)
    decisive = {
        "format": FORMAT,
        "sources": [source.digest for source in described],
        "tokenizer": tokenizer.info.digest,
        "validation_fraction": validation_fraction,
    }
    return _Job(
        address=hashlib.sha256(canonical_json(decisive).encode("ascii")).hexdigest(),
        sources=described,
        parts=tuple(cut_into_parts(file for _, files in listed for file in files)),
        validation_fraction=validation_fraction,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer_name,
    )


def _prepare(job: _Job, folder: Path, workers: int | None, report: Report) -> PreparedCorpus:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            if folder.exists():
                _check_folder(folder, job.address)
            else:
                _make(job, folder, workers or os.cpu_count() or 1, report)
    except OSError as error:
        raise CorpusError(f"cannot prepare: {error.strerror}", where=str(error.filename or folder)) from error
    corpus = open_prepared(folder)
    if corpus.train.path.stat().st_size <= VERIFY_BELOW:
        corpus.verify()
    return corpus


def _make(job: _Job, folder: Path, workers: int, report: Report) -> None:
    """Tokenise what is missing, merge, and rename into place."""
    work = folder.with_name(f".{folder.name}.tmp")
    _open_work(work, job.address)
    results = _tokenise(job, work, workers, report)
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


def _tokenise(job: _Job, work: Path, workers: int, report: Report) -> list[PartResult]:
    parts, total = job.parts, job.input_bytes
    results = {number: found for number in range(len(parts)) if (found := finished_part(work, number))}
    missing = [number for number in range(len(parts)) if number not in results]
    sizes = [sum(part.end - part.begin for part in ranges) for ranges in parts]
    done = sum(sizes[number] for number in results)

    def advance(read: int) -> None:
        nonlocal done
        done += read
        report(Progress("tokenise", done, total))

    advance(0)
    fraction = job.validation_fraction
    if min(workers, len(missing)) > 1:
        made = make_parts(
            work,
            parts,
            missing,
            tokenizer_name=job.tokenizer_name,
            validation_fraction=fraction,
            workers=workers,
        )
        for number, result in made:
            results[number] = result
            advance(sizes[number])
    else:
        for number in missing:
            results[number] = make_part(
                work,
                number,
                parts[number],
                tokenizer=job.tokenizer,
                validation_fraction=fraction,
                progress=advance,
            )
    return [results[number] for number in range(len(parts))]


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of a corpus folder; the kernel lets go of it when the process dies. Raises OSError."""
    descriptor = os.open(
        folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
    )
    try:
        while not _locked(descriptor):
            report(Progress("wait"))  # again and again, so that a caller can give up
            time.sleep(POLL)
        yield
    finally:
        os.close(descriptor)


def _check_folder(folder: Path, address: str) -> None:
    """Refuse a folder that holds anything but this very corpus."""
    if not is_prepared(folder):
        raise UsageError(
            "exists and is not a prepared corpus", where=str(folder), hint="choose another folder"
        )
    if open_prepared(folder).manifest.address != address:
        raise UsageError(
            "holds a corpus of other sources, tokenizer or validation fraction",
            where=str(folder),
            hint="choose another folder, or remove that one first",
        )


def _slug(source: str) -> str:
    """A short folder name that says where the corpus comes from."""
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(source).name).strip("-").lower()[:40] or "corpus"
