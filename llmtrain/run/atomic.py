"""Files that are either wholly there or not at all: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o644) -> None:
    """Replace a file in one step; readers see the old bytes or the new ones. Raises OSError.

    The folder is made when it is missing. Safe against other writers of the same path: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        _write_synced(temporary, data.encode("utf-8") if isinstance(data, str) else data, mode)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def create_once(path: Path, data: bytes | str, *, mode: int = 0o644) -> bool:
    """Create a file with its whole content; False when it exists already. Of many callers exactly one wins.

    A hard link is the atomic step, which network file systems keep too, unlike locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        _write_synced(temporary, data.encode("utf-8") if isinstance(data, str) else data, mode)
        path.hardlink_to(temporary)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)
    return True


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by an indented JSON object that people can read and diff."""
    write_atomic(path, json_text(value))


def json_text(value: Mapping[str, Any]) -> str:
    """The text that `write_json` writes."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sync_folder(path: Path) -> None:
    """Make a rename or a new name in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
