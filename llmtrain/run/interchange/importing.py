"""A Hugging Face folder to a checkpoint of step 0, from which a run starts as from any other checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.model import ModelConfig
from llmtrain.errors import CheckpointError, ConfigError, Problem
from llmtrain.run.checkpoints.commit import begin_save, commit_save
from llmtrain.run.checkpoints.folder import Checkpoint
from llmtrain.run.checkpoints.manifest import CheckpointInfo
from llmtrain.run.checkpoints.shard import PieceHead, write_shard
from llmtrain.run.interchange.names import Correspondence, TheirTensor, correspondence
from llmtrain.run.interchange.safetensors_files import StoredTensor, find_tensors

SHARD_BYTES = 4 << 30
"""Shards are about as large, so that ranks can read in parallel."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer's state, which starts at zero."""
KNOWN_EXTRAS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Endings of tensors that some folders store and that are computed, not trained."""
PREFIXES = ("", "transformer.", "model.")
"""Some folders leave out the outermost name."""


def import_huggingface(
    source: Path,
    root: Path,
    model: ModelConfig,
    info: CheckpointInfo,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Checkpoint:
    """Commit the weights of a Hugging Face folder as a checkpoint below `root`; one tensor in memory at a
    time.

    `info` says for which run, and step 0. Raises UsageError (no safetensors, pickle only), ConfigError with
    every tensor that is missing, left over or of another shape, CheckpointError for damaged files or a
    failing disk.
    """
    mapping = correspondence(model)
    stored = _match(source, mapping, find_tensors(source))
    names = {name: tensor for tensor in mapping.tensors for name in tensor.ours}
    groups = list(_groups(mapping.shapes, shard_bytes))
    total = sum(prod(shape) for shape in mapping.shapes.values()) * 4
    done = 0
    try:
        temporary = begin_save(root, info.step)
        for rank, group in enumerate(groups):
            write_shard(temporary, rank, _heads(mapping, group), _contents(mapping, names, stored, group))
            done += sum(prod(mapping.shapes[name]) for name in group) * 4
            progress(done, total)
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror}", where=str(root)) from error
    return commit_save(temporary, info, len(groups))[0]


def _match(
    source: Path, mapping: Correspondence, found: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The stored tensor for every tensor of theirs; raises ConfigError with all that do not fit."""
    matched: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    used: set[str] = set()
    for tensor in mapping.tensors:
        name = next((n for prefix in PREFIXES if (n := tensor.name.removeprefix(prefix)) in found), None)
        if name is None:
            problems.append(Problem(str(source), f"tensor {tensor.name!r} is missing"))
            continue
        used.add(name)
        matched[tensor.name] = found[name]
        wanted = mapping.shape(tensor)
        if found[name].shape != wanted:
            there = list(found[name].shape)
            message = f"tensor {name!r} has shape {there}, the recipe's model needs {list(wanted)}"
            problems.append(Problem(str(source), message))
    for name in sorted(set(found) - used):
        tied = name.endswith("lm_head.weight") and "head.weight" not in mapping.shapes
        if not tied and not name.endswith(KNOWN_EXTRAS):
            problems.append(Problem(str(source), f"tensor {name!r} has no place in the recipe's model"))
    if problems:
        raise ConfigError(problems[:50])
    return matched


def _groups(shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> Iterator[list[str]]:
    """Names in groups of about `shard_bytes`, weights and moments together."""
    group: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        group.append(name)
        filled += 12 * prod(shape)
        if filled >= shard_bytes:
            yield group
            group, filled = [], 0
    if group:
        yield group


def _heads(mapping: Correspondence, names: list[str]) -> list[PieceHead]:
    heads: list[PieceHead] = []
    for name in names:
        shape = mapping.shapes[name]
        for part in ("master", *MOMENTS):
            key = f"{name}/{part}"
            heads.append(PieceHead(key, "F32", shape, (0,) * len(shape), shape, 0, prod(shape)))
    return heads


def _contents(
    mapping: Correspondence,
    names: Mapping[str, TheirTensor],
    stored: Mapping[str, StoredTensor],
    group: list[str],
) -> Iterator[memoryview]:
    for name in group:
        weights = np.ascontiguousarray(_part(mapping, names[name], stored, name), "<f4")
        yield _bytes(weights)
        zeros = np.zeros(weights.shape, "<f4")
        for _ in MOMENTS:
            yield _bytes(zeros)


def _part(
    mapping: Correspondence, tensor: TheirTensor, stored: Mapping[str, StoredTensor], name: str
) -> NDArray[np.float32]:
    """One of ours out of one of theirs."""
    whole = stored[tensor.name].read()
    if tensor.transposed:
        whole = whole.T
    position = tensor.ours.index(name)
    first = sum(mapping.shapes[other][0] for other in tensor.ours[:position])
    return whole[first : first + mapping.shapes[name][0]]


def _bytes(values: NDArray[np.float32]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
