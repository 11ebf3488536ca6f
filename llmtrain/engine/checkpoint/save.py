"""Saving: every rank writes its pieces to one safetensors shard, all agree, one rank commits.

A failure on any rank is a CheckpointError on all of them, and the checkpoint before stays the newest. Format:
https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data without gaps).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from llmtrain.engine.checkpoint.pieces import DTYPE_NAMES, Piece, Ranks
from llmtrain.engine.disturbance import disturbance
from llmtrain.errors import CheckpointError, LlmtrainError
from llmtrain.run.checkpoints.commit import begin_save, clean_leftovers, commit_save
from llmtrain.run.checkpoints.delta import Bytes
from llmtrain.run.checkpoints.folder import Checkpoint, parse_name
from llmtrain.run.checkpoints.manifest import Base, CheckpointInfo, manifest_digest
from llmtrain.run.checkpoints.shard import PieceHead, discard_shard, write_delta_shard, write_shard

PAYS = 0.85
"""An incremental checkpoint of more than this share of a full one is not worth its chain: a full one is
written in its place."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint, as all ranks know it."""

    checkpoint: Checkpoint
    base: Base
    """What an incremental one may build upon: this one."""
    bytes: int
    """Of all shards."""
    is_full: bool


@dataclass(frozen=True, slots=True)
class Previous:
    """The checkpoint that an incremental one builds upon; its pieces are still in host memory."""

    base: Base
    pieces: Sequence[Piece]
    """Those that this rank owns, one for each piece that is saved now, in the same order."""


def save_checkpoint(
    root: Path,
    info: CheckpointInfo,
    pieces: Iterable[Piece],
    ranks: Ranks,
    *,
    writer: str = "",
    own: Mapping[str, Any] = MappingProxyType({}),
    previous: Previous | None = None,
    before_commit: Callable[[], object] = lambda: None,
) -> Saved:
    """Save and commit one checkpoint; called by all ranks together, in any thread.

    `root` is the run's `checkpoints/` on a file system that all ranks share. `writer` names the attempt,
    `own` is state of this rank alone. With `previous` (on all ranks or on none) only changed bytes are
    written, if that pays. `before_commit` is called on rank 0 once all is written. Raises CheckpointError,
    with the ranks that failed and why, on all ranks alike.
    """
    what = f"saving step {info.step}"
    name = try_together(ranks, what, lambda: _begin(root, info.step, writer) if ranks.rank == 0 else "")[0]
    temporary = root / name
    shard = _Shard(temporary, ranks, what, own)

    def commit() -> str:
        before_commit()
        return _commit(temporary, info, ranks)

    try:
        if previous is not None and shard.write_delta(pieces, previous):
            info = replace(info, base=previous.base)
        else:
            shard.write(pieces)
        told = try_together(ranks, what, lambda: commit() if ranks.rank == 0 else "")[0]
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    committed, digest, size = json.loads(told)
    checkpoint = Checkpoint(*(parse_name(committed) or (info.step, 1)), root / committed)
    return Saved(checkpoint, Base(committed, digest), size, info.base is None)


def owned_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """What a rank writes of its pieces, in the order of its shard."""
    return sorted((p for p in pieces if p.owner and p.data.numel()), key=lambda p: -p.data.element_size())


def save_shard(
    folder: Path, rank: int, pieces: Iterable[Piece], own: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """Write the pieces that this rank owns to its shard, then the sidecar with its own state; durable on
    return. Returns the shard's bytes.

    Raises OSError (disk full, read-only) or ValueError (one key with two dtypes or shapes).
    """
    disturbance.before_write()
    owned = owned_pieces(pieces)
    heads = [_head(piece) for piece in owned]
    return write_shard(folder, rank, heads, (_array(piece).data for piece in owned), state=own)


def _begin(root: Path, step: int, writer: str) -> str:
    clean_leftovers(root)
    return begin_save(root, step, writer).name


@dataclass(frozen=True, slots=True)
class _Shard:
    """This rank's part of a save, which all ranks write together."""

    folder: Path
    ranks: Ranks
    what: str
    own: Mapping[str, Any]

    def write(self, pieces: Iterable[Piece]) -> None:
        """Write all bytes."""
        try_together(
            self.ranks, self.what, lambda: str(save_shard(self.folder, self.ranks.rank, pieces, self.own))
        )

    def write_delta(self, pieces: Iterable[Piece], previous: Previous) -> bool:
        """Write changed bytes; False, with nothing left of them, where they do not pay."""

        def write() -> str:
            disturbance.before_write()
            owned = owned_pieces(pieces)
            heads = [_head(piece) for piece in owned]
            pairs = zip(owned, previous.pieces, strict=True)
            contents = ((_array(new), _array(old)) for new, old in pairs)
            stored = write_delta_shard(self.folder, self.ranks.rank, heads, contents, state=self.own)
            return json.dumps([stored, sum(head.nbytes for head in heads)])

        def discard() -> str:
            discard_shard(self.folder, self.ranks.rank)
            return ""

        sizes = [json.loads(told) for told in try_together(self.ranks, self.what, write)]
        if sum(stored for stored, _ in sizes) <= PAYS * sum(full for _, full in sizes):
            return True
        try_together(self.ranks, self.what, discard)
        return False


def _commit(temporary: Path, info: CheckpointInfo, ranks: Ranks) -> str:
    checkpoint, manifest = commit_save(temporary, info, ranks.world_size)
    return json.dumps([checkpoint.name, manifest_digest(manifest), manifest.nbytes])


def try_together(ranks: Ranks, what: str, work: Callable[[], str]) -> Sequence[str]:
    """Do this rank's part of `what`, then learn how all have fared: what each returned; raises the same
    CheckpointError on all when one has failed."""
    error = value = ""
    try:
        value = work()
    except (OSError, ValueError, LlmtrainError, RuntimeError, MemoryError) as failure:
        error = _text(failure)
    return _agree(ranks, what, error, value)


def _head(piece: Piece) -> PieceHead:
    return PieceHead(
        piece.key,
        DTYPE_NAMES[piece.data.dtype],
        piece.global_shape,
        piece.box_start,
        piece.box_shape,
        piece.flat_start,
        piece.data.numel(),
    )


def _agree(ranks: Ranks, what: str, error: str, value: str) -> Sequence[str]:
    """Exchange errors and values; raise the same CheckpointError on all ranks when one has failed."""
    try:
        answers = [json.loads(text) for text in ranks.exchange(json.dumps([error, value]))]
    except RuntimeError as failure:  # a rank is gone, or silent for too long
        raise CheckpointError(f"{what} failed: {error or failure}", may_pass=True) from failure
    failed = [(rank, fault) for rank, (fault, _) in enumerate(answers) if fault]
    if failed:
        told = "; ".join(f"rank {rank}: {fault}" for rank, fault in failed[:4])
        more = f"; and {len(failed) - 4} more ranks" if len(failed) > 4 else ""
        raise CheckpointError(f"{what} failed: {told}{more}")
    return [value for _, value in answers]


def _text(error: Exception) -> str:
    if isinstance(error, LlmtrainError):
        return error.text()
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def _array(piece: Piece) -> Bytes:
    """The piece's bytes in host memory; no copy when it is there already."""
    return piece.data.detach().to("cpu").contiguous().view(torch.uint8).numpy()
