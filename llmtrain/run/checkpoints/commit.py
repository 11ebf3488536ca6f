"""The second phase of a save: at any moment, killed or not, the last committed checkpoint stays loadable.

Order of a commit: shards and sidecars durable -> manifest durable -> rename -> folder durable -> pointer
durable.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llmtrain.errors import CheckpointError
from llmtrain.run.atomic import sync_folder, write_atomic
from llmtrain.run.checkpoints.boxes import cover_fault
from llmtrain.run.checkpoints.folder import (
    LEFTOVER,
    POINTER,
    Checkpoint,
    next_name,
    parse_name,
)
from llmtrain.run.checkpoints.manifest import (
    MANIFEST,
    CheckpointInfo,
    Manifest,
    PieceEntry,
    ShardEntry,
    TensorEntry,
    delta_name,
    encode_manifest,
    shard_name,
    sidecar_name,
)
from llmtrain.run.checkpoints.parse import read_sidecar


def begin_save(root: Path, step: int, writer: str = "") -> Path:
    """Make and return the empty folder of a new save, `step-XXXXXXXX[-N][.writer].tmp`; raises
    CheckpointError.

    Called by one rank. `writer` (the attempt) keeps a late rank of an older attempt from writing into this
    save.
    """
    temporary = root / f"{next_name(root, step)}{'.' + writer if writer else ''}{LEFTOVER}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot be made: {error.strerror}", where=str(temporary)) from error
    return temporary


def commit_save(temporary: Path, info: CheckpointInfo, world_size: int) -> tuple[Checkpoint, Manifest]:
    """Turn the shards that all ranks have made durable into the newest checkpoint; called by one rank, after
    a barrier.

    Raises CheckpointError when a sidecar is missing or the pieces do not cover every tensor exactly once; the
    folder then stays a leftover, and the last checkpoint the newest.
    """
    manifest = gather_manifest(temporary, info, world_size)
    root = temporary.parent
    final = root / temporary.name.split(".", 1)[0]
    place = parse_name(final.name)
    if place is None or place[0] != info.step:
        raise CheckpointError(f"is not a save of step {info.step}", where=str(temporary))
    try:
        write_atomic(temporary / MANIFEST, encode_manifest(manifest))
        temporary.rename(final)
        sync_folder(root)
        point_to(root, final.name)
    except OSError as error:
        raise CheckpointError(f"cannot be committed: {error.strerror}", where=str(temporary)) from error
    return Checkpoint(*place, final), manifest


def gather_manifest(folder: Path, info: CheckpointInfo, world_size: int) -> Manifest:
    """Merge the sidecars of all ranks; raises CheckpointError for a missing one, a contradiction or a gap."""
    shards: list[ShardEntry] = []
    heads: dict[str, tuple[str, tuple[int, ...]]] = {}
    pieces: dict[str, list[PieceEntry]] = {}
    for rank in range(world_size):
        shard, tensors = read_sidecar(folder / sidecar_name(rank), rank)
        if shard.file != (delta_name(rank) if info.base else shard_name(rank)):
            raise CheckpointError(f"names {shard.file}", where=str(folder / sidecar_name(rank)))
        shards.append(shard)
        for key, entry in tensors.items():
            head = heads.setdefault(key, (entry.dtype, entry.shape))
            if head != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"tensor {key!r} is {entry.dtype} {list(entry.shape)} on rank {rank}, "
                    f"but {head[0]} {list(head[1])} on a lower rank",
                    where=str(folder),
                )
            pieces.setdefault(key, []).extend(entry.pieces)
    merged = {key: TensorEntry(*head, tuple(pieces[key])) for key, head in heads.items()}
    for key, entry in merged.items():
        fault = cover_fault(entry.shape, [piece.geometry for piece in entry.pieces])
        if fault:
            raise CheckpointError(f"tensor {key!r}: {fault}", where=str(folder))
    return Manifest(info=info, shards=tuple(shards), tensors=merged)


def clean_leftovers(root: Path) -> list[str]:
    """Remove what killed saves and deletions left behind; return the names.

    Only for the one writer of a run, while no save is under way. A leftover that cannot be removed stays; it
    harms nobody.
    """
    removed: list[str] = []
    if not root.is_dir():
        return removed
    for entry in sorted(root.iterdir()):
        if not (entry.name.startswith(("step-", f".{POINTER}.")) and entry.name.endswith(LEFTOVER)):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        if not os.path.lexists(entry):
            removed.append(entry.name)
    return removed


def point_to(root: Path, name: str) -> None:
    """Let `latest` name a checkpoint, atomically and durably; raises OSError."""
    write_atomic(root / POINTER, f"{name}\n")
