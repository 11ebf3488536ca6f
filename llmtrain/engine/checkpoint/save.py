"""Saving: every rank writes its pieces to one safetensors shard, all agree, one rank commits.

A failure on any rank is a CheckpointError on all of them, and the checkpoint before stays the newest. Format:
https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data without gaps).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from llmtrain.engine.checkpoint.pieces import DTYPE_NAMES, Piece, Ranks
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints.commit import begin_save, clean_leftovers, commit_save
from llmtrain.run.checkpoints.folder import Checkpoint, parse_name
from llmtrain.run.checkpoints.manifest import CheckpointInfo
from llmtrain.run.checkpoints.shard import PieceHead, write_shard


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

    Raises OSError (disk full, read-only) or ValueError (one key with two dtypes or shapes).
    """
    owned = sorted((p for p in pieces if p.owner and p.data.numel()), key=lambda p: -p.data.element_size())
    heads = [
        PieceHead(
            piece.key,
            DTYPE_NAMES[piece.data.dtype],
            piece.global_shape,
            piece.box_start,
            piece.box_shape,
            piece.flat_start,
            piece.data.numel(),
        )
        for piece in owned
    ]
    return write_shard(folder, rank, heads, (_bytes(piece) for piece in owned))


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


def _bytes(piece: Piece) -> memoryview:
    """The piece's bytes in host memory; no copy when it is there already."""
    flat = piece.data.detach().to("cpu").contiguous().view(torch.uint8)
    return flat.numpy().data
