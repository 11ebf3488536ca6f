"""What a checkpoint says about itself: `manifest.json`, and the sidecar that each rank writes beside its
shard.

A checkpoint is a folder `step-XXXXXXXX` of safetensors shards, one per rank, and a manifest that maps every
tensor, by its global name and shape, to the pieces stored in the shards. Byte ranges are absolute positions
in the shard file. An incremental one names the checkpoint before it (`base`), and its shards hold blocks of
changed bytes (`delta.py`) for the very same pieces.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

SCHEMA = 3
INCREMENTAL_SCHEMA = 4
"""Of incremental checkpoints, which versions that know only full ones must refuse."""
EARLIER = {SCHEMA: 1, INCREMENTAL_SCHEMA: 2}
"""Of the same with SHA-256 as the shards' checksums, and XOR in place of differences; these are read too."""
MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r"shard-(\d{5,9})\.(?:safetensors|delta)")

ITEM_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of one element, by safetensors dtype name."""


def shard_name(rank: int) -> str:
    """File name of a rank's shard."""
    return f"shard-{rank:05d}.safetensors"


def delta_name(rank: int) -> str:
    """File name of a rank's shard in an incremental checkpoint."""
    return f"shard-{rank:05d}.delta"


def sidecar_name(rank: int) -> str:
    """File name of a rank's sidecar."""
    return f"shard-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """Where one piece of a tensor lies: elements [flat_start, flat_start + numel) of the flattening of a
    box."""

    shard: int
    """Index into the manifest's shards, which is the rank that wrote it."""
    begin: int
    """First byte in the shard file."""
    end: int
    """Byte after the last one."""
    box_start: tuple[int, ...]
    box_shape: tuple[int, ...]
    flat_start: int
    numel: int
    blocks: tuple[int, ...] = ()
    """Stored bytes of every block of an incremental checkpoint's piece (`delta.py`); none in a full one."""

    @property
    def identity(self) -> tuple[int, tuple[int, ...], int]:
        """What tells the pieces of one tensor apart, in a checkpoint and in those that it builds upon."""
        return (self.shard, self.box_start, self.flat_start)

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """What `boxes.cover_fault` and `boxes.sub_boxes` take."""
        return (self.box_start, self.box_shape, self.flat_start, self.numel)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor by its global shape, and all its pieces."""

    dtype: str
    """safetensors dtype name, e.g. F32."""
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard file."""

    file: str
    bytes: int
    checksum: str
    """`kind:digits` (`checksum.py`)."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Anything of the rank that wrote it and of nobody else, as JSON."""


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that an incremental one builds upon, in the same folder of checkpoints."""

    name: str
    digest: str
    """Of its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a training state is, besides its tensors."""

    run_id: str
    recipe_digest: str
    """Digest that a resume must match; "" when the writer has none."""
    step: int
    """Last optimizer step contained in the state."""
    consumed_samples: int
    """Global samples consumed so far: the data cursor."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Layout that wrote it, for people; loading does not need it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Anything else of the engine, as JSON: schedule, scaler, seeds."""
    base: Base | None = None
    """What an incremental checkpoint builds upon; None: it is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint."""

    info: CheckpointInfo
    shards: tuple[ShardEntry, ...]
    tensors: Mapping[str, TensorEntry]
    digest: str = ""
    """Of everything else in `manifest.json`; "" before it is encoded."""
    is_xor: bool = False
    """Whether an incremental one's blocks are as earlier versions stored them (`delta.py`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the text of `manifest.json`; its `digest` covers everything else in it."""
    document = _document(manifest)
    document["digest"] = document_digest(document)
    return (json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n").encode()


def manifest_digest(manifest: Manifest) -> str:
    """The `digest` that `encode_manifest` writes."""
    return manifest.digest or document_digest(_document(manifest))


def _document(manifest: Manifest) -> dict[str, Any]:
    info = manifest.info
    document: dict[str, Any] = {
        "schema": INCREMENTAL_SCHEMA if info.base else SCHEMA,
        "run_id": info.run_id,
        "recipe_digest": info.recipe_digest,
        "step": info.step,
        "consumed_samples": info.consumed_samples,
        "layout": dict(info.layout),
        "extra": dict(info.extra),
        "shards": [encode_shard(shard) for shard in manifest.shards],
        "tensors": {key: encode_tensor(entry) for key, entry in sorted(manifest.tensors.items())},
    }
    if info.base:
        document["base"] = {"name": info.base.name, "digest": info.base.digest}
    return document


def encode_shard(shard: ShardEntry) -> dict[str, Any]:
    """Return a shard as it stands in manifests, and in the sidecar beside it."""
    entry: dict[str, Any] = {"file": shard.file, "bytes": shard.bytes, "checksum": shard.checksum}
    return {**entry, "state": dict(shard.state)} if shard.state else entry


def encode_tensor(entry: TensorEntry) -> dict[str, Any]:
    """Return a tensor as it stands in manifests and sidecars."""
    pieces = [
        {
            "shard": p.shard,
            "bytes": [p.begin, p.end],
            "box": [p.box_start, p.box_shape],
            "flat": [p.flat_start, p.numel],
            **({"blocks": p.blocks} if p.blocks else {}),
        }
        for p in entry.pieces
    ]
    return {"dtype": entry.dtype, "shape": entry.shape, "pieces": pieces}


def document_digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of everything but `digest`."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    canonical = json.dumps(rest, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
