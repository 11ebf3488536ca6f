"""`job.json`.

The one file that a rank reads besides torchrun's variables, and `attempts/<n>/attempt.json` beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from llmtrain.config.codec import digest, from_json, to_json
from llmtrain.config.job import JobSpec
from llmtrain.config.layout import Layout
from llmtrain.errors import ConfigError, RunError
from llmtrain.run.atomic import write_json

T = TypeVar("T")

NEW_RUN_HINT = "restore the file as it was, or launch a new run with `llmtrain launch`"


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
    ranks: tuple[tuple[int, ...], ...] = ()
    """Ranks of each node, by local rank; (): not written down."""
    restore: Literal["fresh", "newest"]
    """`fresh`: the run has no history, start from the seed.

    `newest`: load the newest valid checkpoint; when the run never committed one, the ranks start from the
    seed again and say so; a run that has committed one never starts fresh.
    """
    snapshot: str = ""
    """Snapshot in the nodes' memory to restore rather, which is newer; the checkpoint is what remains when it
    cannot be."""
    run_created: float = 0.0
    """Epoch seconds: tells the run from one that had its folder before, and left snapshots in memory."""
    between_failures: float = 0.0
    """Mean seconds between two failures of the run, which the checkpoint interval follows; 0: unknown."""


def read_job_file(path: Path, *, edited_too: bool = False) -> JobFile:
    """What `job.json` holds; raises RunError when it is missing, torn, or of another schema.

    Also when recipe or cluster were edited after the launch, unless `edited_too`: for what must work on such
    a run as well, like ending it. The digest is compared with the file as it is written, so that fields that
    a later version adds do not matter.
    """
    content = _read_content(path, 1)
    job = _decode(path, JobFile, content)
    if not edited_too:
        _refuse_edited(path, content["spec"])
    return job


def _refuse_edited(path: Path, spec: dict[str, Any]) -> None:
    try:
        found = digest({"recipe": spec["recipe"], "cluster": spec["cluster"]})
    except ValueError:  # NaN and infinities, which no launch writes
        found = "none"
    if found != spec["digest"]:
        raise RunError(
            f"spec.recipe or spec.cluster was edited after the launch: their digest is {found}, "
            f"spec.digest says {spec['digest']}; a run keeps what it was launched with",
            where=str(path),
            hint=NEW_RUN_HINT,
        )


def write_attempt_file(path: Path, attempt: AttemptFile) -> None:
    """Write `attempt.json` in one step. Raises OSError."""
    write_json(path, to_json(attempt))


def read_attempt_file(path: Path) -> AttemptFile:
    """What `attempt.json` holds; raises RunError when it is missing, torn, or of another schema."""
    return read_document(path, AttemptFile)


def read_document(path: Path, cls: type[T], schema: int = 1) -> T:
    """Dataclass that a JSON file of a run holds; raises RunError that names the file and every wrong key."""
    return _decode(path, cls, _read_content(path, schema))


def _read_content(path: Path, schema: int) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError("no such file", where=str(path), hint="is this a run directory?") from None
    except OSError as error:
        raise RunError(f"cannot be read: {(error.strerror or str(error)).lower()}", where=str(path)) from None
    except (ValueError, RecursionError):
        raise RunError("is not JSON; it was torn or edited", where=str(path), hint=NEW_RUN_HINT) from None
    if not isinstance(content, dict):
        raise RunError("holds no JSON object", where=str(path), hint=NEW_RUN_HINT)
    found = content.get("schema")
    if found != schema:
        raise RunError(
            f"has schema {found!r}; this llmtrain reads schema {schema}",
            where=str(path),
            hint="use the llmtrain version that wrote it",
        )
    return content


def _decode(path: Path, cls: type[T], content: dict[str, Any]) -> T:
    try:
        return from_json(cls, content, where=str(path))
    except ConfigError as error:
        run_error = RunError(str(error), where=str(path))
        run_error.problems = error.problems
        raise run_error from None
