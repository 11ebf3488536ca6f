"""Layouts that a state is taken between, on up to eight real ranks: save under each, load under each."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.engine.build import Parts
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import Wishes, train_step
from llmtrain.errors import ConfigError
from llmtrain.plan.layouts.supported import check_supported
from llmtrain.run.checkpoints import list_checkpoints
from tests.support.engine_cases import Case, build, llama, recipe

STEPS = 2


def model() -> ModelConfig:
    """Odd sizes: no axis divides the vocabulary, and shards end inside rows; six heads go with tp 2, 3, 6."""
    return llama(layers=4, hidden=36, heads=6, kv_heads=6, head_dim=6, ffn_hidden=66, vocab=97)


def candidates() -> list[Layout]:
    """Layouts of the axes that the engine runs, small and odd worlds too."""
    found = [
        Layout(micro_batch=2),
        Layout(dp=2, zero=0),
        Layout(dp=2),
        Layout(dp=3),
        Layout(dp=5),
        Layout(dp=8),
        Layout(dp=4, zero=2),
        Layout(dp=3, zero=3),
        Layout(tp=2),
        Layout(tp=3, sequence_parallel=False),
        Layout(tp=6),
        Layout(pp=2),
        Layout(pp=4),
        Layout(pp=2, vpp=2, schedule="interleaved"),
        Layout(dp=2, tp=2, pp=2),
        Layout(dp=2, tp=3),
        Layout(dp=2, tp=2, zero=0),
        Layout(dp=3, pp=2),
        Layout(dp=2, pp=2, vpp=2, schedule="interleaved"),
        Layout(tp=2, pp=4),
        Layout(tp=2, pp=2, vpp=2, schedule="interleaved"),
        Layout(dp=7, zero=0),
        Layout(dp=2, tp=2, pp=2, zero=2),
        Layout(dp=2, tp=2, zero=3),
    ]
    return [layout for layout in found if is_supported(layout)]


def is_supported(layout: Layout) -> bool:
    try:
        check_supported(case_of(layout).recipe, layout)
    except ConfigError:
        return False
    return True


def case_of(layout: Layout) -> Case:
    return Case(recipe(model(), mode="bf16", global_batch=8 * 3 * 5 * 7, steps=20), layout)


def folder_of(root: str, number: int, parts: Parts) -> CheckpointFolder:
    return CheckpointFolder(Path(root) / str(number), "run", parts, writer="1")


def save_all(rank: int, world_size: int, root: str, layouts: Sequence[tuple[int, Layout]]) -> dict[int, Any]:
    """Under each layout of this world: take steps, save, and return digests of the gathered state."""
    torch.set_num_threads(1)
    found = {}
    for number, layout in layouts:
        case = case_of(layout)
        parts = build(
            replace(
                case, recipe=replace(case.recipe, batch=replace(case.recipe.batch, global_size=8 * layout.dp))
            ),
            rank,
        )
        for step in range(1, STEPS + 1):
            train_step(parts, step, Wishes())
        folder = folder_of(root, number, parts)
        folder.save(Progress(STEPS, STEPS * 8 * layout.dp, 1e-3))
        found[number] = gathered(folder, rank, world_size)
    return found


def load_all(
    rank: int, world_size: int, root: str, layouts: Sequence[tuple[int, Layout]], saved: Sequence[int]
) -> dict[tuple[int, int], Any]:
    """Under each layout of this world: load what every other one saved; digests of the gathered state."""
    torch.set_num_threads(1)
    from llmtrain.engine.checkpoint.load import load_pieces

    found = {}
    for number, layout in layouts:
        parts = build(case_of(layout), rank)
        folder = folder_of(root, number, parts)
        for source in saved:
            if source == number:
                continue
            for piece in folder.pieces:
                piece.data.fill_(7.0)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            load_pieces(list_checkpoints(Path(root) / str(source))[0].path, folder.pieces)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            found[source, number] = (gathered(folder, rank, world_size), grown)
    return found


def gathered(folder: CheckpointFolder, rank: int, world_size: int) -> dict[str, str] | None:
    """SHA-256 of every whole tensor, put together on rank 0 from what all ranks hold; replicas must agree."""
    own = [
        (
            piece.key,
            piece.global_shape,
            piece.box_start,
            piece.box_shape,
            piece.flat_start,
            piece.data.clone(),
        )
        for piece in folder.pieces
    ]
    everything: list[Any] = [None] * world_size
    if world_size > 1:
        dist.gather_object(own, everything if rank == 0 else None)
    else:
        everything = [own]
    if rank:
        return None
    whole: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    for key, shape, start, box, flat_start, data in (piece for one in everything for piece in one):
        tensor = whole.setdefault(key, torch.zeros(shape))
        mask = known.setdefault(key, torch.zeros(shape, dtype=torch.bool))
        index = tuple(slice(low, low + size) for low, size in zip(start, box, strict=True))
        part, seen = tensor[index].reshape(-1), mask[index].reshape(-1)
        place = slice(flat_start, flat_start + data.numel())
        assert not (seen[place] & (part[place] != data)).any(), f"copies of {key} differ"
        part[place], seen[place] = data, True
        tensor[index], mask[index] = part.view(box), seen.view(box)
    assert all(bool(mask.all()) for mask in known.values())
    return {key: hashlib.sha256(tensor.numpy()).hexdigest() for key, tensor in whole.items()}
