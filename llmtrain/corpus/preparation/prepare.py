"""Preparing a corpus: tokenise sources, or adopt an indexed corpus as it stands, once.

Several processes may prepare the same corpus at once: one works, the others wait for it.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from llmtrain.config.data import DataConfig
from llmtrain.corpus.preparation.adopt import adoption, is_indexed
from llmtrain.corpus.preparation.tokenise import tokenise_job
from llmtrain.corpus.prepared import PreparedCorpus, is_prepared, open_prepared
from llmtrain.corpus.progress import Progress, Report
from llmtrain.corpus.tokenizer import load_tokenizer
from llmtrain.errors import CorpusError, UsageError, is_misnamed
from llmtrain.resources import user_path

POLL = 0.2
"""Seconds between two looks at a lock that another process holds."""
VERIFY_BELOW = 1 << 30
"""A corpus that is there already is read and compared with its digests when it is smaller, bytes."""


class Job(Protocol):
    """One way to make a corpus."""

    @property
    def address(self) -> str:
        """Digest of everything that decides the content."""

    def make(self, folder: Path, workers: int, report: Report) -> None:
        """Write the corpus; the folder appears whole or not at all."""


def prepare(
    data: DataConfig, storage: Path, *, workers: int | None = None, progress: Report | None = None
) -> PreparedCorpus:
    """Return the corpus that a recipe's `data` names, below `storage`; made first when it is not there.

    `data.corpus` may be a folder that was prepared before; its tokenizer must then be `data.tokenizer`. It
    may also be the prefix of a Megatron-LM corpus (`PREFIX.bin`, `PREFIX.idx`), which is used where it lies.
    Raises UsageError for a wrong source or tokenizer, InputError for a torn source, CorpusError when it
    cannot be made or what is there is damaged.
    """
    given = user_path(data.corpus)
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


def _job(sources: Sequence[str], tokenizer_name: str, validation_fraction: float) -> Job:
    if not 0 <= validation_fraction < 1:
        raise UsageError(f"validation fraction must be at least 0 and below 1, not {validation_fraction}")
    indexed = [source for source in sources if is_indexed(source)]
    if not indexed:
        return tokenise_job(sources, tokenizer_name, validation_fraction)
    if len(sources) > 1:
        hint = "prepare each into a folder of its own; data.blend of a recipe mixes them"
        raise UsageError("an indexed corpus must be the only source", where=indexed[0], hint=hint)
    return adoption(indexed[0], tokenizer_name, validation_fraction)


def _prepare(job: Job, folder: Path, workers: int | None, report: Report) -> PreparedCorpus:
    try:
        if not folder.exists():  # One that exists is whole: it got its name last.
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder, report):
                if not folder.exists():
                    job.make(folder, workers or os.cpu_count() or 1, report)
        _check_folder(folder, job.address)
    except OSError as error:
        kind = UsageError if is_misnamed(error) else CorpusError
        raise kind(f"cannot prepare: {error.strerror}", where=str(error.filename or folder)) from error
    corpus = open_prepared(folder)
    if corpus.train.path.stat().st_size <= VERIFY_BELOW:
        corpus.verify()
    return corpus


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of a corpus folder; the kernel lets go of it when the process dies. Raises OSError.

    Whoever holds it removes its file at the end. One that waited may then hold a file without a name, which
    keeps nobody out: it begins again.
    """
    path = folder.with_name(f".{folder.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not _locked(descriptor):
                report(Progress("wait"))  # again and again, so that a caller can give up
                time.sleep(POLL)
            if not _is_named(descriptor, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path; opening it again asks the server, if any."""
    try:
        with path.open("rb") as again:
            return os.path.samestat(os.fstat(again.fileno()), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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
