"""`job.json`: the one file that a rank reads besides torchrun's variables, and `attempts/<n>/attempt.json` beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmtrain.config.job import JobSpec
from llmtrain.config.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What `job.json` holds; the same for every attempt of a run."""

    schema: int = 1
    run_id: str
    version: str
    """llmtrain version that wrote it."""
    spec: JobSpec
    layout: Layout
    """The chosen plan's layout; an attempt may use another rung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFile:
    """What `attempt.json` holds."""

    schema: int = 1
    number: int
    layout: Layout
    nodes: tuple[str, ...]
    """Host names, in node-rank order."""
    restore: Literal["fresh", "newest"]
    """`fresh`: the run has no history, start from the seed. `newest`: load the newest valid checkpoint; when the run never
    committed one, the ranks start from the seed again and say so; a run that has committed one never starts fresh."""
