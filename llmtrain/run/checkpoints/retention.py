"""Which checkpoints go, and deleting them: only after a later commit, and never one that another builds upon.

A deletion renames to a name that no reader looks into, then removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import CheckpointError, Problem
from llmtrain.run.atomic import sync_folder
from llmtrain.run.checkpoints.folder import LEFTOVER, Checkpoint, list_checkpoints
from llmtrain.run.checkpoints.parse import read_manifest
from llmtrain.run.checkpoints.verify import verify

Protect = Callable[[Checkpoint], bool]


@dataclass(frozen=True, slots=True)
class Retention:
    """What happens to each checkpoint, newest first."""

    outdated: tuple[Checkpoint, ...]
    """Those that may go."""
    kept: tuple[Checkpoint, ...]
    damaged: Mapping[str, tuple[Problem, ...]]
    """Faults of kept ones that were looked at, by name."""


def prune(
    root: Path, keep: int, *, protect: Protect = lambda _: False, checksums: bool = False
) -> list[Checkpoint]:
    """Delete what `outdated` returns, and return it, newest first.

    Raises CheckpointError when one cannot be deleted, ValueError when keep < 1.
    """
    doomed = outdated(root, keep, protect=protect, checksums=checksums)
    delete(doomed)
    return doomed


def outdated(
    root: Path, keep: int, *, protect: Protect = lambda _: False, checksums: bool = False
) -> list[Checkpoint]:
    """Checkpoints that may go, newest first (`retention`). Raises as `prune` does."""
    return list(retention(root, keep, protect=protect, checksums=checksums).outdated)


def retention(
    root: Path,
    keep: int,
    *,
    protect: Protect = lambda _: False,
    checksums: bool = False,
    all_kept: bool = False,
) -> Retention:
    """Which checkpoints go: all but the `keep` newest whole full ones, those for which `protect` is true,
    incremental ones that no whole full one follows, and what these build upon. Whole by their sizes, or with
    `checksums` by every byte.

    Damaged checkpoints do not count, so that never fewer than `keep` whole ones are left where there were as
    many. With `all_kept`, also those that are kept whatever their state are looked at, by their sizes alone.
    Raises as `prune` does.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, not {keep}")
    doomed: list[Checkpoint] = []
    kept: list[Checkpoint] = []
    damaged: dict[str, tuple[Problem, ...]] = {}
    needed: set[str] = set()
    whole = 0
    for checkpoint in list_checkpoints(root):
        is_needed = checkpoint.name in needed or protect(checkpoint)
        base = None if whole >= keep and not is_needed else _base_of(checkpoint)
        if not is_needed and (whole >= keep or (whole and base)):
            doomed.append(checkpoint)
            continue
        kept.append(checkpoint)
        counts = base is None and whole < keep
        problems = verify(checkpoint.path, checksums=checksums and counts) if counts or all_kept else []
        if problems:
            damaged[checkpoint.name] = tuple(problems)
        whole += counts and not problems
        if base is not None:
            needed.add(base)
    return Retention(tuple(doomed), tuple(kept), damaged)


def delete(checkpoints: Iterable[Checkpoint]) -> None:
    """Delete checkpoints in the order given, newest first: what builds upon another goes before it. Raises
    CheckpointError."""
    for checkpoint in checkpoints:
        _delete(checkpoint.path)


def kept_for_ever(every_steps: int | None) -> Protect:
    """What `prune` is given as `protect`: checkpoints whose step is a multiple of `every_steps`; None:
    none."""
    return lambda checkpoint: bool(every_steps) and checkpoint.step % int(every_steps or 1) == 0


def _base_of(checkpoint: Checkpoint) -> str | None:
    """Name of what an incremental checkpoint builds upon; None for a full one, and for one that nobody can
    read."""
    try:
        base = read_manifest(checkpoint.path).info.base
    except CheckpointError:
        return None
    return base.name if base else None


def _delete(path: Path) -> None:
    hidden = path.with_name(f"{path.name}.deleted{LEFTOVER}")
    try:
        if hidden.exists():
            shutil.rmtree(hidden)
        path.rename(hidden)
        sync_folder(path.parent)
        shutil.rmtree(hidden)
    except FileNotFoundError:
        return  # somebody else deleted it at the same time
    except OSError as error:
        raise CheckpointError(f"cannot be deleted: {error.strerror}", where=str(path)) from error
