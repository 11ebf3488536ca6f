"""The folder `checkpoints/` of a run: names of checkpoints, which there are, and the pointer `latest`.

`step-00000050` is the checkpoint after step 50. When a run that was thrown back passes step 50 again, the new
one is `step-00000050-2`: a committed checkpoint is never overwritten, so there is no moment without one.
Names that end in `.tmp` are saves and deletions under way, or what a killed one left behind; no reader looks
into them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import CheckpointError, Problem, UsageError

POINTER = "latest"
LEFTOVER = ".tmp"
_NAME = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?")


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A committed checkpoint on disk, which may have been damaged since; ordered by age."""

    step: int
    generation: int
    """1, or more when the step was saved again."""
    path: Path

    @property
    def name(self) -> str:
        """Folder name."""
        return self.path.name


def checkpoint_name(step: int, generation: int = 1) -> str:
    """Folder name of a checkpoint."""
    return f"step-{step:08d}" + (f"-{generation}" if generation > 1 else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return (step, generation) of a checkpoint's folder name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """All committed checkpoints, newest first; a symbolic link is none. Raises CheckpointError when root is
    unreadable."""
    try:
        entries = list(os.scandir(root))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot be listed: {error.strerror}", where=str(root), may_pass=error.errno != errno.ENOTDIR
        ) from error
    found: list[Checkpoint] = []
    for entry in entries:
        place = parse_name(entry.name)
        if place and entry.is_dir(follow_symlinks=False):
            found.append(Checkpoint(*place, root / entry.name))
    return sorted(found, reverse=True)


def next_name(root: Path, step: int) -> str:
    """Name for a new checkpoint of a step; never one that exists."""
    taken = [checkpoint.generation for checkpoint in list_checkpoints(root) if checkpoint.step == step]
    return checkpoint_name(step, max(taken, default=0) + 1)


def open_regular(path: Path) -> int:
    """Open a regular file for reading, without following a symbolic link; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file", str(path))
    return descriptor


def read_pointer(root: Path) -> str | None:
    """Name in the pointer `latest`: the last checkpoint that was committed; None when there is none or it is
    garbage."""
    try:
        with os.fdopen(open_regular(root / POINTER), "rb") as stream:
            name = stream.read(100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if parse_name(name) else None


def last_committed(root: Path) -> Checkpoint | None:
    """The checkpoint that was committed last, by the pointer; without one that leads anywhere, the one of the
    highest step. A run that fell back leaves damaged ones of higher steps behind. Raises CheckpointError."""
    checkpoints, name = list_checkpoints(root), read_pointer(root)
    named = [checkpoint for checkpoint in checkpoints if checkpoint.name == name]
    return next(iter(named or checkpoints), None)


def lost_pointer(root: Path, checkpoints: Sequence[Checkpoint]) -> list[Problem]:
    """What is wrong with the checkpoint that the pointer names, when it is none of those that there are."""
    name = read_pointer(root)
    if not name or name in {checkpoint.name for checkpoint in checkpoints}:
        return []
    state = "is a symbolic link, which is never followed" if (root / name).is_symlink() else "is missing"
    return [Problem(str(root / name), f"was committed last (`{POINTER}` names it) but {state}")]


def ever_committed(root: Path) -> bool:
    """Whether this run has committed a checkpoint at any time, damaged or lost since or not."""
    return os.path.lexists(root / POINTER) or bool(list_checkpoints(root))


def resolve_step(root: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest one. Raises UsageError naming those that exist when there is
    none of the step, CheckpointError when there is none at all."""
    checkpoints = list_checkpoints(root)
    chosen = [found for found in checkpoints if step is None or found.step == step]
    if chosen:
        return chosen[0]
    if not checkpoints:
        raise CheckpointError("there is no checkpoint", where=str(root))
    steps = ", ".join(str(found.step) for found in checkpoints[:10])
    raise UsageError(f"there is no checkpoint of step {step}", where=str(root), hint=f"steps saved: {steps}")
