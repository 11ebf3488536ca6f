"""Incremental checkpoints and what they build upon: following the chain, and reading pieces through it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints.delta import Bytes, block_lengths, decode
from llmtrain.run.checkpoints.folder import open_regular
from llmtrain.run.checkpoints.manifest import ITEM_BYTES, Manifest, PieceEntry
from llmtrain.run.checkpoints.parse import may_pass, read_manifest

LONGEST = 1000
"""Checkpoints of a chain that are followed."""


@dataclass(frozen=True, slots=True)
class Link:
    """One checkpoint of a chain."""

    path: Path
    manifest: Manifest


def read_chain(path: Path, manifest: Manifest | None = None) -> tuple[Link, ...]:
    """A checkpoint and all that it builds upon, itself first, the full one last.

    Raises CheckpointError, naming the one at fault, when a base is missing or a link, is not the one that was
    built upon, or does not hold the same pieces.
    """
    links = [Link(path, manifest or read_manifest(path))]
    while (base := links[-1].manifest.info.base) is not None:
        newer, folder = links[-1], path.with_name(base.name)
        if len(links) >= LONGEST:
            raise CheckpointError(f"builds upon more than {LONGEST} others", where=str(path))
        if folder.is_symlink() or not folder.is_dir():
            raise CheckpointError(f"its base {base.name} is missing", where=str(newer.path))
        older = read_manifest(folder)
        fault = _fault(newer.manifest, older, base.digest)
        if fault:
            raise CheckpointError(f"its base {base.name} {fault}", where=str(newer.path))
        links.append(Link(folder, older))
    return tuple(links)


def _fault(newer: Manifest, older: Manifest, digest: str) -> str:
    if older.digest != digest:
        return "is not the checkpoint that it was made from"
    if older.info.step > newer.info.step or older.info.run_id != newer.info.run_id:
        return "is of a later step or another run"
    if older.tensors.keys() != newer.tensors.keys():
        return "holds other tensors"
    for key, entry in newer.tensors.items():
        before = older.tensors[key]
        if (before.dtype, before.shape) != (entry.dtype, entry.shape) or _shapes(before.pieces) != _shapes(
            entry.pieces
        ):
            return f"holds other pieces of tensor {key!r}"
    return ""


def _shapes(pieces: Sequence[PieceEntry]) -> dict[tuple[int, tuple[int, ...], int], tuple[object, int]]:
    return {piece.identity: (piece.box_shape, piece.numel) for piece in pieces}


class ChainReader:
    """Reads whole pieces of an incremental checkpoint; memory is bounded by two pieces. Use as a context."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._files: dict[tuple[int, int], int] = {}
        self._last: tuple[tuple[str, object], Bytes] | None = None

    def __enter__(self) -> ChainReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, key: str, piece: PieceEntry) -> Bytes:
        """The bytes of a piece of the newest checkpoint, [numel x item]; its shards are taken as verified.
        Not to be changed. Raises CheckpointError when a shard is missing, short or a link, or holds no
        blocks."""
        wanted = (key, piece.identity)
        if self._last is not None and self._last[0] == wanted:
            return self._last[1]
        item = ITEM_BYTES[self._links[-1].manifest.tensors[key].dtype]
        content = np.empty(piece.numel * item, np.uint8)
        for number in reversed(range(len(self._links))):
            pieces = self._links[number].manifest.tensors[key].pieces
            own = next(each for each in pieces if each.identity == piece.identity)
            self._apply(number, own, content, item)
        self._last = (wanted, content)
        return content

    def _apply(self, number: int, piece: PieceEntry, content: Bytes, item: int) -> None:
        if not piece.blocks:
            self._read(number, piece.shard, piece.begin, memoryview(content.data))
            return
        begin, start = piece.begin, 0
        for stored, length in zip(piece.blocks, block_lengths(len(content)), strict=True):
            packed = memoryview(bytearray(stored))
            self._read(number, piece.shard, begin, packed)
            try:
                part, is_xor = content[start : start + length], self._links[number].manifest.is_xor
                decode(packed, length, part, item, is_xor=is_xor)
            except ValueError as error:
                link = self._links[number]
                name = link.manifest.shards[piece.shard].file
                raise CheckpointError(str(error), where=str(link.path / name)) from error
            begin, start = begin + stored, start + length

    def _read(self, number: int, shard: int, begin: int, target: memoryview) -> None:
        descriptor, done = self._open(number, shard), 0
        while done < target.nbytes:
            count = os.preadv(descriptor, [target[done:]], begin + done)
            if not count:
                raise CheckpointError("ends too early", where=str(self._path(number, shard)))
            done += count

    def _open(self, number: int, shard: int) -> int:
        if (number, shard) not in self._files:
            path = self._path(number, shard)
            try:
                self._files[number, shard] = open_regular(path)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be opened: {error.strerror}", where=str(path), may_pass=may_pass(error)
                ) from error
        return self._files[number, shard]

    def _path(self, number: int, shard: int) -> Path:
        link = self._links[number]
        return link.path / link.manifest.shards[shard].file
