"""From what a user names to files, in an order that is the same everywhere, and to parts of bounded size."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmtrain.corpus.given import GIVEN
from llmtrain.corpus.prepared import MANIFEST, SourceInfo, file_sha256
from llmtrain.errors import CorpusError, InputError, UsageError, is_misnamed
from llmtrain.resources import user_path

STANDARD_LIBRARY = "python-stdlib"
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders that belong to other packages or that some distributions leave out."""
KINDS: dict[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
"""Kind of a file by its suffix; in a folder, other suffixes are left out."""
COMPRESSIONS: dict[str, str] = {".gz": "gz", ".zst": "zst"}
"""Second suffix of a text or jsonl file."""
PART_BYTES = 64 << 20
"""Input bytes of one part, the unit of parallel work and of restarting."""
WHOLE_BELOW = 1 << 20
"""Files of a folder below this size are one section; larger ones are cut."""
SECTION_BYTES = 64 << 10
"""Largest section of a text file that is cut."""
SECTIONS_WANTED = 2048
"""A single small text file is cut finely enough for a validation split by sections."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file."""

    path: Path
    name: str
    """Path inside the source; part of the digest."""
    kind: str
    size: int
    section: int
    """Bytes after which a text is cut into sections, each of which may go to either split."""
    compression: str = ""
    """"", "gz" or "zst"; a compressed file is read from its beginning, by one worker."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [begin, end) of a file; lines belong to the range in which they begin."""

    file: SourceFile
    begin: int
    end: int


def find_files(source: str) -> list[SourceFile]:
    """All files of a source in the order of their names; raises UsageError when there is none."""
    if source == STANDARD_LIBRARY:
        return _standard_library()
    if not source:
        raise UsageError("a source has no name", hint="name a file or a folder; `.` is this one")
    path = user_path(source)  # An unknown `~user` stays as it is, and is told as missing.
    if path.is_dir():
        names = sorted(_walk(path, lambda name: bool(_kind(name)[0])))
        if not names:
            raise _without_text(path, source)
        return [_file(path / name, name, in_folder=True) for name in names]
    if not path.exists():
        raise UsageError(
            "no such file or folder",
            where=source,
            hint=GIVEN,
        )
    return [_file(path, path.name, in_folder=False)]


def _without_text(folder: Path, source: str) -> UsageError:
    if (folder / MANIFEST).is_file():
        hint = "it needs no preparation: name it as data.corpus of a recipe"
        return UsageError("is a prepared corpus, which holds tokens and no text", where=source, hint=hint)
    packed = ", ".join(suffix for suffix, kind in KINDS.items() if kind != "parquet")
    packing = " or ".join(COMPRESSIONS)
    hint = f"suffixes that are read: {', '.join(KINDS)}, and with {packing} after them {packed}"
    return UsageError("holds no text, jsonl or parquet file", where=source, hint=hint)


def taken_for_text(source: str) -> str:
    """Suffix of a file that is read as plain text for want of a better reader; "" for all others."""
    path = user_path(source)
    return path.suffix if path.is_file() and not _kind(path.name)[0] else ""


def describe(source: str, files: Sequence[SourceFile]) -> SourceInfo:
    """Digest a source: names and contents of all its files. Raises InputError when one may not be read,
    CorpusError when the disk fails."""
    total = hashlib.sha256()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for file, digest in zip(files, pool.map(_digest, files), strict=True):
            total.update(
                f"{file.name}\0{file.kind}\0{file.compression}\0{file.section}\0{digest}\n".encode(
                    "utf-8", "surrogateescape"
                )
            )
    return SourceInfo(
        source=source, files=len(files), bytes=sum(file.size for file in files), digest=total.hexdigest()
    )


def _digest(file: SourceFile) -> str:
    with as_input():
        return file_sha256(file.path)


@contextmanager
def as_input() -> Iterator[None]:
    """What is wrong with a file that was named is an InputError; what its disk did stays a CorpusError."""
    try:
        yield
    except CorpusError as error:
        if isinstance(error.__cause__, OSError) and not is_misnamed(error.__cause__):
            raise
        wrong = InputError(str(error))
        wrong.problems = error.problems
        raise wrong from error


def unreadable(path: Path, error: OSError) -> CorpusError:
    """The error for a source's file that cannot be read."""
    kind = InputError if is_misnamed(error) else CorpusError
    return kind(f"cannot be read: {error.strerror}", where=str(path))


def cut_into_parts(files: Iterable[SourceFile], size: int = PART_BYTES) -> Iterator[tuple[FileRange, ...]]:
    """Group small files and cut large ones into parts of about `size` input bytes, in order."""
    part: list[FileRange] = []
    filled = 0
    for file in files:
        begin = 0
        while begin < file.size:
            end = file.size if file.compression else min(file.size, begin + size - filled)
            part.append(FileRange(file, begin, end))
            filled += end - begin
            begin = end
            if filled >= size:
                yield tuple(part)
                part, filled = [], 0
    if part:
        yield tuple(part)


def _standard_library() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _walk(root, _is_python, NOT_LIBRARY) if not _is_built_here(name)]
    return [_file(root / name, name, in_folder=True, kind="text") for name in sorted(names)]


def _is_python(name: str) -> bool:
    return name.endswith(".py")


def _is_built_here(name: str) -> bool:
    """Files that the build of this one interpreter wrote, with its paths in them."""
    return name.startswith("config-") or name.rsplit("/", 1)[-1].startswith("_sysconfigdata")


def _walk(root: Path, wanted: Callable[[str], bool], left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Relative names, with `/`, of the wanted files; hidden ones are left out."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in files:
            if wanted(name) and not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _file(path: Path, name: str, *, in_folder: bool, kind: str = "") -> SourceFile:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if not path.is_file():
        raise UsageError("is neither a file nor a folder", where=str(path))
    if in_folder:
        section = WHOLE_BELOW if size <= WHOLE_BELOW else SECTION_BYTES
    else:
        section = min(SECTION_BYTES, max(1024, size // SECTIONS_WANTED))
    found, compression = (kind, "") if kind else _kind(name)
    return SourceFile(path, name, found or "text", size, section, compression)


def _kind(name: str) -> tuple[str, str]:
    """(kind, compression) by the suffixes; kind is "" for an unknown one."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1], "") if suffixes else ""
    return ("", "") if compression and kind == "parquet" else (kind, compression)
