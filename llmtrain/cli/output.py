"""Files that a command was asked to write."""

from __future__ import annotations

from pathlib import Path

from llmtrain.cli import console
from llmtrain.errors import LlmtrainError, RunError, UsageError, is_misnamed


def write_output(path: Path, content: str | bytes, *, option: str) -> None:
    """Write a file that `option` named, whole or not at all, and say so. Missing folders are made.

    Raises UsageError when nothing can be there, RunError when the disk fails.
    """
    from llmtrain.run.atomic import write_atomic

    try:
        write_atomic(path, content)
    except OSError as error:
        raise unwritable(path, error, option=option) from error
    console.say(f"wrote {path}")


def unwritable(path: Path, error: OSError, *, option: str) -> LlmtrainError:
    """The error for what `option` named and cannot be written."""
    kind = UsageError if is_misnamed(error) else RunError
    return kind(f"cannot write {path}: {error.strerror or error}", where=option)
