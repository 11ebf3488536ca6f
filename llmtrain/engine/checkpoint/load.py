"""Loading: fill this rank's pieces from a checkpoint that any other layout wrote.

Only the byte ranges that a piece needs are read. Ranges that are contiguous on both sides go straight into
the target; the rest is copied, strided, out of a memory map. Memory stays bounded by the pieces themselves.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from llmtrain.engine.checkpoint.pieces import DTYPE_NAMES, Piece
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints.boxes import Overlap, SubBox, overlap, row_major_strides, sub_boxes
from llmtrain.run.checkpoints.chain import ChainReader, read_chain
from llmtrain.run.checkpoints.folder import open_regular
from llmtrain.run.checkpoints.manifest import Manifest, PieceEntry, TensorEntry
from llmtrain.run.checkpoints.parse import may_pass, read_manifest

STAGING = 16 << 20
"""Host bytes used at a time when the target is on an accelerator."""


@dataclass(slots=True)
class LoadStats:
    """What a load did."""

    pieces: int = 0
    bytes: int = 0
    """Bytes copied into pieces."""


def load_pieces(checkpoint: Path, pieces: Iterable[Piece], manifest: Manifest | None = None) -> LoadStats:
    """Fill the data of every piece, replicas too, in place; the checkpoint's bytes are taken as verified.

    Raises CheckpointError, naming the tensor, when it is not in the checkpoint, has another global shape or
    dtype, or is not covered, and when a shard is missing, short or a link.
    """
    found = manifest or read_manifest(checkpoint)
    stats = LoadStats()
    with _Shards(checkpoint, found) as shards, torch.no_grad():
        for piece in pieces:
            entry = _entry(checkpoint, found, piece)
            filled = sum(_copy(shards, entry, piece))
            if filled != piece.data.numel():
                missing = piece.data.numel() - filled
                raise CheckpointError(
                    f"tensor {piece.key!r}: {missing} of {piece.data.numel()} elements are not in it",
                    where=str(checkpoint),
                )
            stats.pieces += 1
            stats.bytes += filled * piece.data.element_size()
    return stats


def shards_needed(checkpoint: Path, manifest: Manifest, pieces: Iterable[Piece]) -> set[int]:
    """Shards that a load of the pieces reads, and perhaps a few more; raises as `load_pieces` does."""
    return {
        source.shard
        for piece in pieces
        for source in _entry(checkpoint, manifest, piece).pieces
        if _may_meet(source, piece)
    }


def _entry(checkpoint: Path, manifest: Manifest, piece: Piece) -> TensorEntry:
    entry = manifest.tensors.get(piece.key)
    if entry is None:
        raise CheckpointError(f"tensor {piece.key!r} is not in it", where=str(checkpoint))
    if entry.shape != piece.global_shape:
        raise CheckpointError(
            f"tensor {piece.key!r} has shape {list(entry.shape)} in it, "
            f"but {list(piece.global_shape)} in this model",
            where=str(checkpoint),
            hint="the recipe's model is not the one that was saved",
        )
    if entry.dtype != DTYPE_NAMES[piece.data.dtype]:
        raise CheckpointError(
            f"tensor {piece.key!r} is {entry.dtype} in it, but {DTYPE_NAMES[piece.data.dtype]} in this run",
            where=str(checkpoint),
        )
    return entry


def _copy(shards: _Shards, entry: TensorEntry, piece: Piece) -> Iterator[int]:
    """Copy every overlap; yield the number of elements of each."""
    targets = list(sub_boxes(piece.box_start, piece.box_shape, piece.flat_start, piece.data.numel()))
    for source_piece in entry.pieces:
        if not _may_meet(source_piece, piece):
            continue
        for source in sub_boxes(*source_piece.geometry):
            for target in targets:
                shared = overlap(source, target)
                if shared is not None:
                    shards.copy(piece.key, source_piece, shared, piece.data)
                    yield shared.numel


def _may_meet(source: PieceEntry, target: Piece) -> bool:
    """Cheap test first: disjoint ranges of the same box, or disjoint boxes, share nothing."""
    if source.box_start == target.box_start and source.box_shape == target.box_shape:
        low = max(source.flat_start, target.flat_start)
        return low < min(source.flat_start + source.numel, target.flat_start + target.data.numel())
    whole_source = SubBox(source.box_start, source.box_shape, 0, row_major_strides(source.box_shape))
    whole_target = SubBox(target.box_start, target.box_shape, 0, row_major_strides(target.box_shape))
    return overlap(whole_source, whole_target) is not None


class _Shards:
    """Open shards of one checkpoint: descriptors and memory maps, made on first use."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.shards = manifest.shards
        self.chain = None if manifest.info.base is None else ChainReader(read_chain(folder, manifest))
        self.descriptors: dict[int, int] = {}
        self.maps: dict[int, mmap.mmap] = {}

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.maps.clear()  # unmapped when the last tensor on it goes
        if self.chain is not None:
            self.chain.__exit__()

    def copy(self, key: str, source: PieceEntry, shared: Overlap, target: Tensor) -> None:
        """Copy one overlap from a shard into a piece's data."""
        item = target.element_size()
        if (
            self.chain is None
            and _is_contiguous(shared.shape, shared.source_strides)
            and _is_contiguous(shared.shape, shared.target_strides)
        ):
            begin = source.begin + shared.source_offset * item
            self._read(
                source.shard, begin, target[shared.target_offset : shared.target_offset + shared.numel]
            )
            return
        flat = self._map(key, source, target.dtype)
        view = torch.as_strided(flat, shared.shape, shared.source_strides, shared.source_offset)
        base = target.storage_offset() + shared.target_offset
        torch.as_strided(target, shared.shape, shared.target_strides, base).copy_(view)

    def _read(self, shard: int, begin: int, target: Tensor) -> None:
        """Read consecutive bytes into a contiguous target, through a bounded buffer when it is not in host
        memory."""
        if target.device.type == "cpu":
            self._read_host(shard, begin, target)
            return
        step = max(1, STAGING // target.element_size())
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            staged = torch.empty_like(part, device="cpu")
            self._read_host(shard, begin + start * target.element_size(), staged)
            part.copy_(staged)

    def _read_host(self, shard: int, begin: int, target: Tensor) -> None:
        view = target.view(torch.uint8).numpy().data
        descriptor, done = self._open(shard), 0
        while done < view.nbytes:
            count = os.preadv(descriptor, [view[done:]], begin + done)
            if not count:
                raise CheckpointError("ends too early", where=str(self.folder / self.shards[shard].file))
            done += count

    def _map(self, key: str, source: PieceEntry, dtype: torch.dtype) -> Tensor:
        """The source piece's elements: over the memory map, of which nothing is read yet, or put together
        from a chain of incremental checkpoints."""
        if self.chain is not None:
            return torch.from_numpy(self.chain.read(key, source)).view(dtype)
        if source.shard not in self.maps:
            self.maps[source.shard] = mmap.mmap(self._open(source.shard), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable": it is only read
            return torch.frombuffer(
                self.maps[source.shard], dtype=dtype, count=source.numel, offset=source.begin
            )

    def _open(self, shard: int) -> int:
        if shard not in self.descriptors:
            entry = self.shards[shard]
            path = self.folder / entry.file
            try:
                self.descriptors[shard] = open_regular(path)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be opened: {error.strerror}", where=str(path), may_pass=may_pass(error)
                ) from error
            size = os.fstat(self.descriptors[shard]).st_size
            if size != entry.bytes:
                raise CheckpointError(f"has {size} bytes, the manifest says {entry.bytes}", where=str(path))
        return self.descriptors[shard]


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of a strided block lie without gaps; axes of length 1 do not matter."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return prod(shape) > 0
