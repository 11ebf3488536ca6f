"""Safetensors files of other programs: read with the distrust they deserve, written as they expect them.

Format: https://huggingface.co/docs/safetensors. Sharded folders have `model.safetensors.index.json` beside
the shards.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.errors import CheckpointError, UsageError
from llmtrain.run.atomic import write_json
from llmtrain.run.checkpoints.folder import open_regular
from llmtrain.run.checkpoints.manifest import ITEM_BYTES
from llmtrain.run.checkpoints.shard import safetensors_header, write_all

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGEST_HEADER = 100 << 20
FILE_BYTES = 5 << 30
"""Largest file that is written, unless one tensor is larger."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""

    def read(self) -> NDArray[np.float32]:
        """The values as FP32; raises CheckpointError."""
        descriptor = open_regular(self.file)
        try:
            content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        return to_float32(content, self.dtype, self.shape, self.begin)


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a Hugging Face folder, by name; raises CheckpointError naming the file that is wrong."""
    found: dict[str, StoredTensor] = {}
    for path in _files(folder):
        found.update(_read_header(path))
    return found


def to_float32(content: Any, dtype: str, shape: tuple[int, ...], begin: int = 0) -> NDArray[np.float32]:
    """FP32 values of F32, F16, BF16 or F64 bytes."""
    count = prod(shape)
    if dtype == "BF16":
        bits = np.frombuffer(content, "<u2", count, begin).astype("<u4") << 16
        return bits.view("<f4").reshape(shape)
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
    return np.frombuffer(content, kinds[dtype], count, begin).astype(np.float32).reshape(shape)


def from_float32(values: NDArray[np.float32], dtype: str) -> memoryview:
    """Bytes of FP32 values as F32 or BF16 (round to nearest, ties to even); F16's range is too small for
    weights."""
    contiguous = np.ascontiguousarray(values)
    if dtype == "BF16":
        bits = contiguous.view("<u4")
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        quiet = np.where(np.isnan(contiguous), (bits >> 16) | 0x40, rounded)
        return quiet.astype("<u2").reshape(-1).view(np.uint8).data
    return contiguous.astype("<f4", copy=False).reshape(-1).view(np.uint8).data


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], NDArray[np.float32]],
    dtype: str,
    *,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write all tensors, one in memory at a time, into as few files as `file_bytes` allows; raises
    OSError."""
    item = ITEM_BYTES[dtype]
    groups = list(_groups(shapes, item, file_bytes))
    total = sum(prod(shape) for shape in shapes.values()) * item
    done = 0
    places: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        places |= dict.fromkeys(names, name)
        for written in _write_file(folder / name, {key: shapes[key] for key in names}, read, dtype):
            done += written
            progress(done, total)
    if len(groups) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _groups(shapes: Mapping[str, tuple[int, ...]], item: int, file_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * item
        if group and filled + size > file_bytes:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    if group:
        yield group


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], NDArray[np.float32]],
    dtype: str,
) -> Iterator[int]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        size = prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, memoryview(safetensors_header(entries)))
        for name, shape in shapes.items():
            values = read(name)
            if values.shape != shape:
                raise CheckpointError(f"tensor {name!r} has shape {list(values.shape)}, not {list(shape)}")
            content = from_float32(values, dtype)
            write_all(descriptor, content)
            yield content.nbytes
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Sequence[Path]:
    index = folder / INDEX
    if index.is_file():
        return _indexed(index)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
    if pickles:
        raise UsageError(
            f"has its weights in pickle files ({pickles[0]}), which are never loaded",
            where=str(folder),
            hint="convert them to safetensors where you trust them",
        )
    raise UsageError(f"has neither {SINGLE} nor {INDEX}", where=str(folder))


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"is not an index with a weight_map: {error!r:.100}", where=str(index)
        ) from error
    for name in names:
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"names the file {name!r:.100}, which is not followed", where=str(index))
    return [index.with_name(name) for name in names]


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise CheckpointError("is not a safetensors file, or was cut off", where=str(path))
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            shape = tuple(int(axis) for axis in entry["shape"])
            dtype = str(entry["dtype"])
            if dtype not in ("F32", "F16", "BF16", "F64"):
                raise CheckpointError(
                    f"tensor {name!r:.100} is {dtype!r:.20}, not a float format", where=str(path)
                )
            whole = min((0, *shape)) >= 0 and end - begin == prod(shape) * ITEM_BYTES[dtype]
            if not whole or begin < 0 or 8 + length + end > size:
                raise CheckpointError(f"tensor {name!r:.100} does not lie inside the file", where=str(path))
            yield name, StoredTensor(path, dtype, shape, 8 + length + begin)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"has a damaged header: {error!r:.100}", where=str(path)) from error
