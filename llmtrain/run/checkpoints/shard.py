"""Writing one shard: safetensors, or blocks of changed bytes; checksummed while it is written, durable, with
its sidecar.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data without
gaps).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmtrain.run.atomic import write_atomic
from llmtrain.run.checkpoints.checksum import Checksum
from llmtrain.run.checkpoints.delta import Bytes, encode
from llmtrain.run.checkpoints.manifest import (
    ITEM_BYTES,
    ShardEntry,
    delta_name,
    encode_shard,
    shard_name,
    sidecar_name,
)

BLOCK = 8 << 20
"""Bytes handed to one write."""
ALIGNMENT = 64
"""The data begins at a multiple of it, so that pieces can be mapped as arrays."""


@dataclass(frozen=True, slots=True)
class PieceHead:
    """A piece of a tensor without its data: elements [flat_start, flat_start + numel) of a box's
    flattening."""

    key: str
    dtype: str
    """safetensors dtype name."""
    global_shape: tuple[int, ...]
    box_start: tuple[int, ...]
    box_shape: tuple[int, ...]
    flat_start: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.numel * ITEM_BYTES[self.dtype]


def write_shard(
    folder: Path,
    rank: int,
    heads: Sequence[PieceHead],
    contents: Iterable[memoryview],
    *,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Write a rank's pieces, whose bytes `contents` gives in the same order, and its own state; durable on
    return. Returns the size.

    Raises OSError (disk full, read-only), ValueError (one key with two dtypes or shapes, content of a wrong
    length).
    """
    header, tensors = _describe(rank, heads)
    path = folder / shard_name(rank)
    size, checksum = _write(path, header, heads, contents)
    _write_sidecar(rank, path, ShardEntry(path.name, size, checksum, state), tensors)
    return size


def write_delta_shard(
    folder: Path,
    rank: int,
    heads: Sequence[PieceHead],
    contents: Iterable[tuple[Bytes, Bytes]],
    *,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Write the changed bytes of a rank's pieces, of which `contents` gives (new, old) in the same order, and
    its own state; durable on return. Returns the size. Raises as `write_shard` does."""
    path = folder / delta_name(rank)
    tensors: dict[str, Any] = {}
    checksum = Checksum()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    position = 0
    try:
        for head, (new, old) in zip(heads, contents, strict=True):
            begin, sizes = position, []
            for block in encode(new, old, ITEM_BYTES[head.dtype]):
                write_all(descriptor, block)
                checksum.update(block)
                sizes.append(block.nbytes)
            position += sum(sizes)
            _add_piece(tensors, rank, head, begin, sizes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    entry = ShardEntry(path.name, position, checksum.text(), state)
    _write_sidecar(rank, path, entry, tensors)
    return position


def discard_shard(folder: Path, rank: int) -> None:
    """Remove what a rank has written into a save that is not committed; raises OSError."""
    for name in (sidecar_name(rank), delta_name(rank), shard_name(rank)):
        (folder / name).unlink(missing_ok=True)


def _write_sidecar(rank: int, path: Path, shard: ShardEntry, tensors: dict[str, Any]) -> None:
    sidecar = {**encode_shard(shard), "tensors": tensors}
    write_atomic(path.with_name(sidecar_name(rank)), json.dumps(sidecar, separators=(",", ":")))


def safetensors_header(entries: dict[str, Any]) -> bytes:
    """Length and JSON of a safetensors header, padded with spaces to ALIGNMENT."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_all(descriptor: int, content: memoryview) -> None:
    """Write all bytes; raises OSError."""
    start = 0
    while start < content.nbytes:
        start += os.write(descriptor, content[start : start + BLOCK])


def _describe(rank: int, heads: Sequence[PieceHead]) -> tuple[bytes, dict[str, Any]]:
    """Return the safetensors header and the sidecar's tensors, with byte ranges absolute in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "llmtrain", "rank": str(rank)}}
    position = 0
    for head in heads:
        name = head.key
        while name in entries:  # several pieces of one tensor
            name += "'"
        place = [position, position + head.nbytes]
        entries[name] = {"dtype": head.dtype, "shape": [head.numel], "data_offsets": place}
        position += head.nbytes
    header = safetensors_header(entries)
    tensors: dict[str, Any] = {}
    position = len(header)
    for head in heads:
        _add_piece(tensors, rank, head, position)
        position += head.nbytes
    return header, tensors


def _add_piece(
    tensors: dict[str, Any], rank: int, head: PieceHead, begin: int, blocks: Sequence[int] | None = None
) -> None:
    kind = {"dtype": head.dtype, "shape": list(head.global_shape)}
    entry = tensors.setdefault(head.key, {**kind, "pieces": []})
    if {"dtype": entry["dtype"], "shape": entry["shape"]} != kind:
        raise ValueError(f"pieces of {head.key!r} differ in dtype or global shape")
    piece: dict[str, Any] = {
        "shard": rank,
        "bytes": [begin, begin + (head.nbytes if blocks is None else sum(blocks))],
        "box": [list(head.box_start), list(head.box_shape)],
        "flat": [head.flat_start, head.numel],
    }
    if blocks is not None:
        piece["blocks"] = list(blocks)
    entry["pieces"].append(piece)


def _write(
    path: Path, header: bytes, heads: Sequence[PieceHead], contents: Iterable[memoryview]
) -> tuple[int, str]:
    """Size and checksum of what is written."""
    checksum, size = Checksum(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(content: memoryview) -> int:
        write_all(descriptor, content)
        checksum.update(content)
        return content.nbytes

    try:
        size += write(memoryview(header))
        for head, content in zip(heads, contents, strict=True):
            if content.nbytes != head.nbytes:
                raise ValueError(f"piece of {head.key!r} has {content.nbytes} bytes, not {head.nbytes}")
            size += write(content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, checksum.text()
