"""Files that a command was asked to write."""

from __future__ import annotations

from pathlib import Path

from llmtrain.cli import console
from llmtrain.errors import UsageError


def write_output(path: Path, content: str | bytes, *, option: str) -> None:
    """Write a file that `option` named, whole or not at all, and say so. Raises UsageError."""
    from llmtrain.run.atomic import write_atomic

    try:
        write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where=option) from error
    console.say(f"wrote {path}")
