"""`data.json` of a run: which prepared corpus it reads. Written once, before the first attempt; read by every
rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from llmtrain.errors import RunError
from llmtrain.run.atomic import write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """What `data.json` holds."""

    schema: int = 1
    folder: str
    """Absolute path of the prepared corpus (`corpus/prepared.py`)."""
    digest: str
    """The corpus's digest; a rank refuses a folder with another one."""


def write_data_file(path: Path, data: DataFile) -> None:
    """Write `data.json` atomically and durably; raises RunError when it cannot be written."""
    try:
        write_json(path, asdict(data))
    except OSError as error:
        raise RunError(f"cannot write: {error.strerror}", where=str(path)) from error


def read_data_file(path: Path) -> DataFile:
    """Read `data.json`; raises RunError naming the file when it is missing or not what this version
    writes."""
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
            return DataFile(folder=folder, digest=digest)
    raise RunError("is not a data.json of schema 1 with a folder and a digest", where=str(path))
