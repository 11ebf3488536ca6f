"""A checkpoint to a Hugging Face folder: weights only, read shard by shard, one tensor in memory at a
time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.model import ModelConfig
from llmtrain.errors import CheckpointError, Problem, UsageError, is_misnamed
from llmtrain.run.atomic import sync_folder, write_json
from llmtrain.run.checkpoints.arrays import read_tensor
from llmtrain.run.checkpoints.manifest import Manifest
from llmtrain.run.checkpoints.parse import read_manifest
from llmtrain.run.interchange.model_json import model_json
from llmtrain.run.interchange.names import Correspondence, TheirTensor, correspondence
from llmtrain.run.interchange.safetensors_files import FILE_BYTES, write_tensors

WEIGHTS = "/master"
"""Suffix of the FP32 weights among a checkpoint's tensors."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def export_huggingface(
    checkpoint: Path,
    folder: Path,
    model: ModelConfig,
    *,
    dtype: str = "F32",
    tokenizer: Path | None = None,
    separator: int | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write config.json, the weights and, when `tokenizer` is a tokenizer.json, its files; return the
    architecture.

    The folder appears whole or not at all. `dtype` is F32 or BF16. The checkpoint is taken as verified.
    Raises UsageError when the folder exists or transformers has no such architecture, CheckpointError for one
    of another model or a failing disk.
    """
    if folder.exists():
        raise UsageError("exists already", where=str(folder), hint="choose another --out")
    manifest = read_manifest(checkpoint)
    mapping = correspondence(model)
    _check_shapes(checkpoint, manifest, mapping)
    theirs = {tensor.name: tensor for tensor in mapping.tensors}

    def read(name: str) -> NDArray[np.float32]:
        return _gather(checkpoint, manifest, theirs[name])

    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        shapes = {name: mapping.shape(tensor) for name, tensor in theirs.items()}
        write_tensors(temporary, shapes, read, dtype, file_bytes=file_bytes, progress=progress)
        write_json(temporary / "config.json", model_json(model, mapping.architecture, dtype, separator))
        _copy_tokenizer(tokenizer, temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        kind = UsageError if is_misnamed(error) else CheckpointError
        raise kind(f"cannot be written: {error.strerror}", where=str(folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return mapping.architecture


def _check_shapes(checkpoint: Path, manifest: Manifest, mapping: Correspondence) -> None:
    """The checkpoint must hold exactly the model's weights, in FP32."""
    stored = {
        key.removesuffix(WEIGHTS): entry for key, entry in manifest.tensors.items() if key.endswith(WEIGHTS)
    }
    faults = [f"weight {name!r} is missing" for name in mapping.shapes if name not in stored]
    faults += [f"weight {name!r} is not of this model" for name in stored if name not in mapping.shapes]
    for name, shape in mapping.shapes.items():
        entry = stored.get(name)
        if entry and (entry.shape, entry.dtype) != (shape, "F32"):
            faults.append(
                f"weight {name!r} is {entry.dtype} {list(entry.shape)}, the model's is F32 {list(shape)}"
            )
    if faults:
        error = CheckpointError(faults[0], where=str(checkpoint))
        error.problems = tuple(Problem(str(checkpoint), fault) for fault in faults[:20])
        raise error


def _gather(checkpoint: Path, manifest: Manifest, tensor: TheirTensor) -> NDArray[np.float32]:
    parts = [read_tensor(checkpoint, manifest, name + WEIGHTS) for name in tensor.ours]
    whole: NDArray[np.float32] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.T if tensor.transposed else whole


def _copy_tokenizer(tokenizer: Path | None, folder: Path) -> None:
    if tokenizer is None:
        return
    for name in TOKENIZER_FILES:
        source = tokenizer if name == "tokenizer.json" else tokenizer.with_name(name)
        if source.is_file():
            shutil.copyfile(source, folder / name)
