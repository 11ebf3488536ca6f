"""`data.json` of a run: which prepared corpora it reads. Written once, before the first attempt; read by
every rank."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import RunError
from llmtrain.run.atomic import write_json

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPlace:
    """One prepared corpus."""

    folder: str
    """Absolute path (`corpus/prepared.py`)."""
    digest: str
    """The corpus's digest; a rank refuses a folder with another one."""
    order: str = ""
    """Absolute path of the order of its documents (`corpus/document_order.py`); "": as they lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """What `data.json` holds, besides the schema."""

    corpora: tuple[CorpusPlace, ...]
    """In the order of the recipe's blend; at least one."""

    @property
    def digest(self) -> str:
        """Identity of all the data; of one corpus it is the corpus's own."""
        if len(self.corpora) == 1:
            return self.corpora[0].digest
        return hashlib.sha256("\n".join(corpus.digest for corpus in self.corpora).encode()).hexdigest()


def write_data_file(path: Path, data: DataFile) -> None:
    """Write `data.json` atomically and durably; raises RunError when it cannot be written."""
    try:
        write_json(path, {"schema": SCHEMA, "digest": data.digest, **asdict(data)})
    except OSError as error:
        raise RunError(f"cannot write: {error.strerror}", where=str(path)) from error


def read_data_file(path: Path) -> DataFile:
    """Read `data.json`; raises RunError naming the file when it is missing or not what this version or the
    one before writes."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(
            "missing: the run's corpus was never prepared",
            where=str(path),
            hint="start the run with `llmtrain resume`",
        ) from error
    except (OSError, ValueError) as error:
        raise RunError(f"cannot be read: {error}", where=str(path)) from error
    match document:
        case {"schema": 1, "folder": str(folder), "digest": str(digest)}:
            return DataFile(corpora=(CorpusPlace(folder=folder, digest=digest),))
        case {"schema": 2, "corpora": [_, *_] as entries, "digest": str(digest)}:
            data = DataFile(corpora=tuple(_place(entry, path) for entry in entries))
            if data.digest == digest:
                return data
    raise RunError(f"is not a data.json of schema {SCHEMA} with corpora and their digest", where=str(path))


def _place(entry: Any, path: Path) -> CorpusPlace:
    match entry:
        case {"folder": str(folder), "digest": str(digest), "order": str(order)}:
            return CorpusPlace(folder=folder, digest=digest, order=order)
    raise RunError("has a corpus without folder, digest or order", where=str(path))
