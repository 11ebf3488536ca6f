"""`attempts/<n>/out-of-memory/rank-*.json`: which rank ran out of memory, in which step and layout.

Written by the rank itself as it dies; the ranks of later attempts read all of them and use a smaller
micro-batch where the recipe leaves them the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.codec import to_json
from llmtrain.config.layout import Layout
from llmtrain.errors import RunError
from llmtrain.run.atomic import write_json
from llmtrain.run.job_file import read_document
from llmtrain.run.layout import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFile:
    """What one such file holds."""

    schema: int = 1
    rank: int
    step: int
    layout: Layout
    """With the micro-batch in force."""


def write_memory_file(run: RunDir, attempt: int, content: MemoryFile) -> None:
    """Say that a rank ran out of memory. Raises OSError."""
    path = run.attempt(attempt).out_of_memory / f"rank-{content.rank:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, to_json(content))


def read_memory_files(run: RunDir) -> list[tuple[int, MemoryFile]]:
    """(attempt, file) of all attempts, oldest first; what cannot be read is passed over."""
    found: list[tuple[int, MemoryFile]] = []
    for number in run.attempt_numbers():
        for path in sorted(run.attempt(number).out_of_memory.glob("rank-*.json")):
            try:
                found.append((number, read_document(path, MemoryFile)))
            except RunError:
                continue
    return found
