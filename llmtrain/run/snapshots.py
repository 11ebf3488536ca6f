"""Snapshots in a node's shared memory: where they lie, what a node holds of each, and their end.

A snapshot `step-XXXXXXXX.A` (of attempt A) is a folder as a checkpoint's: shards with their sidecars, those
of the node's own ranks and copies of other nodes' ones, and a manifest without tensors. Files in shared
memory outlive every process of the run, its agent too; they end with the run, or with the node.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import CheckpointError, RunError
from llmtrain.run.checkpoints.manifest import SHARD_NAME, Manifest, sidecar_name
from llmtrain.run.checkpoints.parse import read_manifest, read_sidecar

SHARED_MEMORY = Path("/dev/shm")
RANKS = "ranks"
"""Key of a snapshot's `extra`: how many shards there are over all nodes."""
CREATED = "run_created"
"""Key of a snapshot's `extra`: when its run was created; one that had the folder before is another."""
_TRIES = 100
_NAME = re.compile(r"step-(\d{8,18})\.(\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one node holds of a snapshot."""

    name: str
    step: int
    ranks: int
    """Shards over all nodes."""
    created: float
    """When the run was created that took it, in epoch seconds."""
    shards: tuple[int, ...]
    """Those that lie here with their whole length."""


def snapshot_name(step: int, attempt: int) -> str:
    """Folder name of a snapshot."""
    return f"step-{step:08d}.{attempt}"


def parse_snapshot_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a snapshot's folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def snapshots_of(run: Path, node: str) -> Path:
    """Folder of a run's snapshots on this machine, which is called `node`; nothing is made. Only to be asked
    on the node itself."""
    run_key = hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:16]
    node_key = hashlib.sha256(node.encode()).hexdigest()[:8]
    return SHARED_MEMORY / f"llmtrain-{os.getuid()}" / run_key / node_key


def make_private(folder: Path) -> None:
    """Make a run's folder of snapshots, closed to other users. Raises RunError when somebody else has made
    one in its place, OSError."""
    for _ in range(_TRIES):
        top = folder.parents[1]
        with suppress(FileNotFoundError):  # A run that ends beside this one removes what it leaves empty.
            top.mkdir(mode=0o700, exist_ok=True)
            found = top.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise RunError("is not a folder of this user alone", where=str(top), hint="remove it")
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            return
    raise FileNotFoundError(errno.ENOENT, "vanishes again and again", str(folder))


def held_here(folder: Path) -> list[Held]:
    """Complete snapshots, as far as this node knows, newest first; what cannot be read is none."""
    found = []
    with suppress(FileNotFoundError):
        for entry in folder.iterdir():
            place = parse_snapshot_name(entry.name)
            if place is None or entry.is_symlink():
                continue
            with suppress(CheckpointError, OSError):
                ranks, created = origin(read_manifest(entry))
                shards = tuple(shards_in(entry))
                found.append(
                    Held(name=entry.name, step=place[0], ranks=ranks, created=created, shards=shards)
                )
    return sorted(found, key=lambda held: parse_snapshot_name(held.name) or (0, 0), reverse=True)


def origin(manifest: Manifest) -> tuple[int, float]:
    """Shards that a snapshot has over all nodes, and when its run was created; raises CheckpointError."""
    ranks, created = manifest.info.extra.get(RANKS), manifest.info.extra.get(CREATED, 0.0)
    if type(ranks) is not int or ranks < 1 or type(created) not in (int, float):
        raise CheckpointError("its manifest is not a snapshot's")
    return ranks, float(created)


def drop_strangers(folder: Path, created: float) -> None:
    """Remove snapshots that the run created then has not taken, or that nobody can read."""
    with suppress(FileNotFoundError):
        for entry in list(folder.iterdir()):
            if parse_snapshot_name(entry.name) and not is_of_run(entry, created):
                _remove(entry)


def is_of_run(snapshot: Path, created: float) -> bool:
    """Whether a folder holds a snapshot of the run that was created then."""
    with suppress(CheckpointError, OSError):
        return not snapshot.is_symlink() and origin(read_manifest(snapshot))[1] == created
    return False


def shards_in(folder: Path) -> Iterable[int]:
    """Shards that lie in a snapshot's folder with their sidecars and their whole length."""
    for path in sorted(folder.iterdir()):
        match = SHARD_NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        with suppress(CheckpointError, OSError):
            shard, _ = read_sidecar(folder / sidecar_name(int(match[1])), int(match[1]))
            if shard.file == path.name and path.stat().st_size == shard.bytes:
                yield int(match[1])


def newest_complete(nodes: Mapping[str, Sequence[Held]]) -> tuple[str, int] | None:
    """Name and step of the newest snapshot of which the nodes together hold all shards. Pure."""
    ranks: dict[str, int] = {}
    shards: dict[str, set[int]] = {}
    for all_held in nodes.values():
        for held in all_held:
            ranks[held.name] = held.ranks
            shards.setdefault(held.name, set()).update(held.shards)
    whole = [
        name for name, found in shards.items() if sum(shard < ranks[name] for shard in found) == ranks[name]
    ]
    places = {name: place for name in whole if (place := parse_snapshot_name(name)) is not None}
    name = max(places, key=lambda one: places[one], default=None)
    return None if name is None else (name, places[name][0])


def drop(folder: Path, *, keep: str = "") -> None:
    """Remove all snapshots but one; a folder that is left empty goes too."""
    with suppress(FileNotFoundError):
        for entry in folder.iterdir():
            if entry.name != keep:
                _remove(entry)
    for empty in (folder, *folder.parents[:2]):
        with suppress(OSError):
            empty.rmdir()


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def rescue(folder: Path, name: str, shards: Iterable[int], target: Path) -> None:
    """Copy shards of a snapshot to a folder that other nodes can read. Raises OSError, CheckpointError."""
    if parse_snapshot_name(name) is None:
        raise CheckpointError(f"{name!r} is no snapshot")
    target.mkdir(parents=True, exist_ok=True)
    for number in shards:
        shard, _ = read_sidecar(folder / name / sidecar_name(number), number)
        for file in (shard.file, sidecar_name(number)):
            partial = target / f".{file}.part"
            shutil.copyfile(folder / name / file, partial, follow_symlinks=False)
            partial.replace(target / file)
