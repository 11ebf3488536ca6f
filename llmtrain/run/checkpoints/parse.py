"""Reading manifests and sidecars as if an enemy had written them: types, ranges and names are checked,
nothing is followed.

Every failure is a CheckpointError that names the file and the field.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints.checksum import is_checksum
from llmtrain.run.checkpoints.delta import block_count, block_lengths
from llmtrain.run.checkpoints.folder import open_regular, parse_name
from llmtrain.run.checkpoints.manifest import (
    EARLIER,
    INCREMENTAL_SCHEMA,
    ITEM_BYTES,
    MANIFEST,
    SCHEMA,
    SHARD_NAME,
    Base,
    CheckpointInfo,
    Manifest,
    PieceEntry,
    ShardEntry,
    TensorEntry,
    document_digest,
)

MOST_BYTES = 1 << 30
"""Largest manifest that is read."""
MOST = 1 << 62
"""Largest number that is taken for a size or a position."""
MOST_AXES = 16


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json` of a checkpoint; raises CheckpointError."""
    path = folder / MANIFEST
    document = read_document(path)
    reader = _Reader(path)
    expected = INCREMENTAL_SCHEMA if "base" in document else SCHEMA
    if document.get("schema") not in (expected, EARLIER[expected]):
        known = f"{EARLIER[expected]} and {expected}"
        reader.fail("schema", f"is {_short(document.get('schema'))}, this version reads {known}")
    if document.get("digest") != document_digest(document):
        reader.fail("digest", "does not match the manifest's content: it was changed or damaged")
    shards = tuple(
        reader.shard(entry, f"shards[{number}]")
        for number, entry in enumerate(reader.sequence(document.get("shards"), "shards"))
    )
    if len({shard.file for shard in shards}) != len(shards):
        reader.fail("shards", "names a file twice")
    sizes = {number: shard.bytes for number, shard in enumerate(shards)}
    tensors = {
        key: reader.tensor(entry, f"tensors[{_short(key)}]", sizes)
        for key, entry in reader.mapping(document.get("tensors"), "tensors").items()
    }
    info = reader.info(document)
    is_delta = [bool(piece.blocks) for entry in tensors.values() for piece in entry.pieces if piece.numel]
    if info.base is None and any(is_delta):
        reader.fail("base", "is missing, but there are blocks of changed bytes")
    if info.base is not None and not all(is_delta):
        reader.fail("tensors", "hold whole pieces, but there is a base")
    is_xor = info.base is not None and document["schema"] == EARLIER[expected]
    return Manifest(info=info, shards=shards, tensors=tensors, digest=str(document["digest"]), is_xor=is_xor)


def read_sidecar(path: Path, rank: int) -> tuple[ShardEntry, dict[str, TensorEntry]]:
    """Read and check the sidecar that a rank wrote beside its shard; raises CheckpointError."""
    document = read_document(path)
    reader = _Reader(path)
    shard = reader.shard(document, "shard")
    tensors = {
        key: reader.tensor(entry, f"tensors[{_short(key)}]", {rank: shard.bytes})
        for key, entry in reader.mapping(document.get("tensors"), "tensors").items()
    }
    return shard, tensors


def read_document(path: Path) -> dict[str, Any]:
    """Read one JSON object from a regular file of bounded size; raises CheckpointError."""
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            text = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(_reason(error), where=str(path), may_pass=may_pass(error)) from error
    if len(text) > MOST_BYTES:
        raise CheckpointError(f"is larger than {MOST_BYTES} bytes", where=str(path))
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not JSON: {str(error)[:200]}", where=str(path)) from error
    if not isinstance(document, dict):
        raise CheckpointError("is not a JSON object", where=str(path))
    return document


def may_pass(error: OSError) -> bool:
    """Whether reading again may help; not when the file is missing, a link or no regular file (errno 0)."""
    return error.errno not in (0, errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a symbolic link, which is never followed"
    return "missing" if isinstance(error, FileNotFoundError) else str(error.strerror)


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Reader:
    """Checked access to the parts of one document."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, field: str, fault: str) -> NoReturn:
        raise CheckpointError(f"{field} {fault}", where=str(self.path))

    def mapping(self, value: object, field: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self.fail(field, f"is {_short(value)}, not an object")
        return value

    def sequence(self, value: object, field: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(field, f"is {_short(value)}, not a list")
        return value

    def number(self, value: object, field: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            self.fail(field, f"is {_short(value)}, not a whole number in 0..2^62")
        return value

    def text(self, value: object, field: str, allowed: Callable[[str], object] = lambda _: True) -> str:
        if not isinstance(value, str) or not allowed(value):
            self.fail(field, f"is {_short(value)}, which is not allowed here")
        return value

    def pair(self, value: object, field: str) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            self.fail(field, f"is {_short(value)}, not a pair")
        return value[0], value[1]

    def shape(self, value: object, field: str) -> tuple[int, ...]:
        axes = self.sequence(value, field)
        if len(axes) > MOST_AXES:
            self.fail(field, f"has {len(axes)} axes, more than {MOST_AXES}")
        shape = tuple(self.number(size, field) for size in axes)
        if prod(shape) > MOST:
            self.fail(field, f"is {_short(shape)}, more than 2^62 elements")
        return shape

    def info(self, document: Mapping[str, Any]) -> CheckpointInfo:
        return CheckpointInfo(
            run_id=self.text(document.get("run_id"), "run_id"),
            recipe_digest=self.text(document.get("recipe_digest"), "recipe_digest"),
            step=self.number(document.get("step"), "step"),
            consumed_samples=self.number(document.get("consumed_samples"), "consumed_samples"),
            layout=self.mapping(document.get("layout"), "layout"),
            extra=self.mapping(document.get("extra"), "extra"),
            base=self.base(document["base"]) if "base" in document else None,
        )

    def base(self, value: object) -> Base:
        entry = self.mapping(value, "base")
        name = self.text(entry.get("name"), "base.name", parse_name)
        return Base(name, self.text(entry.get("digest"), "base.digest", _is_sha256))

    def shard(self, value: object, field: str) -> ShardEntry:
        entry = self.mapping(value, field)
        name = self.text(entry.get("file"), f"{field}.file", SHARD_NAME.fullmatch)
        size = self.number(entry.get("bytes"), f"{field}.bytes")
        is_earlier = "sha256" in entry and "checksum" not in entry
        told = f"sha256:{entry['sha256']}" if is_earlier else entry.get("checksum")
        checksum = self.text(told, f"{field}.{'sha256' if is_earlier else 'checksum'}", is_checksum)
        return ShardEntry(name, size, checksum, self.mapping(entry.get("state", {}), f"{field}.state"))

    def tensor(self, value: object, field: str, sizes: Mapping[int, int]) -> TensorEntry:
        entry = self.mapping(value, field)
        dtype = self.text(entry.get("dtype"), f"{field}.dtype", ITEM_BYTES.__contains__)
        shape = self.shape(entry.get("shape"), f"{field}.shape")
        pieces = tuple(
            self.piece(piece, f"{field}.pieces[{number}]", dtype, shape, sizes)
            for number, piece in enumerate(self.sequence(entry.get("pieces"), f"{field}.pieces"))
        )
        return TensorEntry(dtype, shape, pieces)

    def piece(
        self,
        value: object,
        field: str,
        dtype: str,
        shape: tuple[int, ...],
        sizes: Mapping[int, int],
    ) -> PieceEntry:
        entry = self.mapping(value, field)
        shard = self.number(entry.get("shard"), f"{field}.shard")
        if shard not in sizes:
            self.fail(f"{field}.shard", f"is {shard}, which is no shard")
        begin, end = (
            self.number(part, f"{field}.bytes") for part in self.pair(entry.get("bytes"), f"{field}.bytes")
        )
        start, box = (
            self.shape(part, f"{field}.box") for part in self.pair(entry.get("box"), f"{field}.box")
        )
        flat, numel = (
            self.number(part, f"{field}.flat") for part in self.pair(entry.get("flat"), f"{field}.flat")
        )
        blocks = self.blocks(entry.get("blocks", []), f"{field}.blocks", numel * ITEM_BYTES[dtype])
        stored = sum(blocks) if blocks else numel * ITEM_BYTES[dtype]
        if end - begin != stored or end > sizes[shard]:
            self.fail(f"{field}.bytes", f"{begin}..{end} do not hold {numel} elements inside the shard")
        if not len(start) == len(box) == len(shape):
            self.fail(f"{field}.box", "has another number of axes than the tensor")
        if any(low + length > size for low, length, size in zip(start, box, shape, strict=True)):
            self.fail(f"{field}.box", f"{start} + {box} is outside the tensor's shape {shape}")
        if flat + numel > prod(box):
            self.fail(f"{field}.flat", f"{flat} + {numel} is outside a box of {prod(box)} elements")
        return PieceEntry(shard, begin, end, start, box, flat, numel, blocks)

    def blocks(self, value: object, field: str, nbytes: int) -> tuple[int, ...]:
        sizes = tuple(self.number(size, field) for size in self.sequence(value, field))
        if not sizes:
            return ()
        if len(sizes) != block_count(nbytes):
            self.fail(field, f"are {len(sizes)}, not {block_count(nbytes)}")
        if any(size > length for size, length in zip(sizes, block_lengths(nbytes), strict=True)):
            self.fail(field, "holds a block that is larger than what it stands for")
        return sizes


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
