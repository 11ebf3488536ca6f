"""Saving: every rank writes its pieces to one safetensors shard, all agree, one rank commits.

A failure on any rank is a CheckpointError on all of them, and the checkpoint before stays the newest. Format:
https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data without gaps).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from llmtrain.engine.checkpoint.pieces import DTYPE_NAMES, Piece, Ranks
from llmtrain.errors import CheckpointError
from llmtrain.run.atomic import write_atomic
from llmtrain.run.checkpoints.commit import begin_save, clean_leftovers, commit_save
from llmtrain.run.checkpoints.folder import Checkpoint, parse_name
from llmtrain.run.checkpoints.manifest import CheckpointInfo, shard_name, sidecar_name

BLOCK = 8 << 20
"""Bytes handed to one write and one checksum update."""


def save_checkpoint(
    root: Path, info: CheckpointInfo, pieces: Iterable[Piece], ranks: Ranks, *, writer: str = ""
) -> Checkpoint:
    """Save and commit one checkpoint; called by all ranks together. Returns the committed checkpoint on all
    of them.

    `root` is the run's `checkpoints/` on a file system that all ranks share. `writer` names the attempt.
    Raises CheckpointError, with the ranks that failed and why, on all ranks alike.
    """
    temporary: Path | None = None
    error = ""
    try:
        if ranks.rank == 0:
            clean_leftovers(root)
            temporary = begin_save(root, info.step, writer)
    except (OSError, CheckpointError) as failure:
        error = _text(failure)
    name = _agree(ranks, info.step, error, temporary.name if temporary else "")[0]
    temporary = root / name
    try:
        try:
            save_shard(temporary, ranks.rank, pieces)
        except (OSError, ValueError, CheckpointError, RuntimeError, MemoryError) as failure:
            error = _text(failure)
        _agree(ranks, info.step, error)
        committed = ""
        try:
            if ranks.rank == 0:
                committed = commit_save(temporary, info, ranks.world_size)[0].name
        except (OSError, CheckpointError) as failure:
            error = _text(failure)
        committed = _agree(ranks, info.step, error, committed)[0]
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise

    return Checkpoint(*(parse_name(committed) or (info.step, 1)), root / committed)


def save_shard(folder: Path, rank: int, pieces: Iterable[Piece]) -> int:
    """Write the pieces that this rank owns to its shard, then the sidecar; durable on return. Returns the
    shard's bytes.

    Raises OSError (disk full, read-only) or ValueError (a piece stored twice, one key with two dtypes).
    """
    owned = sorted((p for p in pieces if p.owner and p.data.numel()), key=lambda p: -p.data.element_size())
    header, tensors = _describe(rank, owned)
    path = folder / shard_name(rank)
    size, digest = _write_shard(path, header, owned)
    sidecar = {"file": path.name, "bytes": size, "sha256": digest, "tensors": tensors}
    write_atomic(folder / sidecar_name(rank), json.dumps(sidecar, separators=(",", ":")))
    return size


def _agree(ranks: Ranks, step: int, error: str, value: str = "") -> Sequence[str]:
    """Exchange errors and values; raise the same CheckpointError on all ranks when one has failed."""
    answers = [json.loads(text) for text in ranks.exchange(json.dumps([error, value]))]
    failed = [(rank, fault) for rank, (fault, _) in enumerate(answers) if fault]
    if failed:
        told = "; ".join(f"rank {rank}: {fault}" for rank, fault in failed[:4])
        more = f"; and {len(failed) - 4} more ranks" if len(failed) > 4 else ""
        raise CheckpointError(f"saving step {step} failed: {told}{more}")
    return [value for _, value in answers]


def _text(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return error.text()
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def _describe(rank: int, pieces: Sequence[Piece]) -> tuple[bytes, dict[str, Any]]:
    """Return the safetensors header and the sidecar's tensors, with byte ranges absolute in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "llmtrain", "rank": str(rank)}}
    position = 0
    placed: list[tuple[Piece, int, int]] = []
    for piece in pieces:
        size = piece.data.numel() * piece.data.element_size()
        name = piece.key
        while name in entries:
            name += "'"
        entries[name] = {
            "dtype": DTYPE_NAMES[piece.data.dtype],
            "shape": [piece.data.numel()],
            "data_offsets": [position, position + size],
        }
        placed.append((piece, position, position + size))
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    header = struct.pack("<Q", len(text)) + text
    tensors: dict[str, Any] = {}
    for piece, begin, end in placed:
        _add_piece(tensors, rank, piece, len(header) + begin, len(header) + end)
    return header, tensors


def _add_piece(tensors: dict[str, Any], rank: int, piece: Piece, begin: int, end: int) -> None:
    head = {"dtype": DTYPE_NAMES[piece.data.dtype], "shape": list(piece.global_shape)}
    entry = tensors.setdefault(piece.key, {**head, "pieces": []})
    if {"dtype": entry["dtype"], "shape": entry["shape"]} != head:
        raise ValueError(f"pieces of {piece.key!r} differ in dtype or global shape")
    entry["pieces"].append(
        {
            "shard": rank,
            "bytes": [begin, end],
            "box": [list(piece.box_start), list(piece.box_shape)],
            "flat": [piece.flat_start, piece.data.numel()],
        }
    )


def _write_shard(path: Path, header: bytes, pieces: Sequence[Piece]) -> tuple[int, str]:
    """Write and checksum side by side; the checksum runs in a thread, one piece behind at most."""
    digest = hashlib.sha256(header)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    size = len(header)
    with ThreadPoolExecutor(1) as pool:
        try:
            pending: Future[None] = pool.submit(_write_all, descriptor, memoryview(header))
            for piece in pieces:
                content = _bytes(piece)
                pending.result()
                pending = pool.submit(_update, digest, content)
                _write_all(descriptor, content)
                size += content.nbytes
            pending.result()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return size, digest.hexdigest()


def _bytes(piece: Piece) -> memoryview:
    """The piece's bytes in host memory; no copy when it is there already."""
    flat = piece.data.detach().to("cpu").contiguous().view(torch.uint8)
    return flat.numpy().data


def _update(digest: Any, content: memoryview) -> None:
    for start in range(0, content.nbytes, BLOCK):
        digest.update(content[start : start + BLOCK])


def _write_all(descriptor: int, content: memoryview) -> None:
    start = 0
    while start < content.nbytes:
        start += os.write(descriptor, content[start : start + BLOCK])
