"""Whole tensors of a checkpoint as numpy arrays, for export on a machine without torch."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints.boxes import sub_boxes
from llmtrain.run.checkpoints.chain import ChainReader, read_chain
from llmtrain.run.checkpoints.folder import open_regular
from llmtrain.run.checkpoints.manifest import Manifest

NUMPY: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "|u1", "F8_E5M2": "|u1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "BOOL": "|u1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip
"""numpy dtype of every safetensors dtype; formats that numpy lacks come as their bits."""


def read_tensor(folder: Path, manifest: Manifest, key: str) -> NDArray[Any]:
    """Return a whole tensor, gathered from all shards; its pieces are taken as verified.

    Raises CheckpointError when the tensor or a shard is missing.
    """
    entry = manifest.tensors.get(key)
    if entry is None:
        raise CheckpointError(f"tensor {key!r} is not in it", where=str(folder))
    whole = np.empty(entry.shape, NUMPY[entry.dtype])
    with ChainReader(read_chain(folder, manifest)) as chain:
        for piece in entry.pieces:
            if manifest.info.base is None:
                content = _map(folder / manifest.shards[piece.shard].file)
                flat = np.frombuffer(content, whole.dtype, piece.numel, piece.begin)
            else:
                flat = chain.read(key, piece).view(whole.dtype)
            for part in sub_boxes(*piece.geometry):
                place = tuple(
                    slice(low, low + size) for low, size in zip(part.start, part.shape, strict=True)
                )
                count = int(np.prod(part.shape))
                whole[place] = flat[part.offset : part.offset + count].reshape(part.shape)
    return whole


def _map(path: Path) -> mmap.mmap:
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise CheckpointError(f"cannot be opened: {error.strerror}", where=str(path)) from error
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be mapped: {error}", where=str(path)) from error
    finally:
        os.close(descriptor)
