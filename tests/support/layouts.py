"""Random training states under random layouts, without processes: every rank is simulated in turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from llmtrain.engine.checkpoint.pieces import Piece
from llmtrain.engine.checkpoint.save import save_shard
from llmtrain.run.checkpoints import Checkpoint, CheckpointInfo, begin_save, commit_save

DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@dataclass
class FakeLayout:
    """How a world cuts every tensor: a tensor-parallel axis with uneven cuts, a stage, ZeRO cuts anywhere."""

    dp: int
    tp: int
    pp: int
    axis: dict[str, int | None] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    zero_cuts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    stage: dict[str, int] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, tp)"""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp


def random_state(rng: random.Random, tensors: int = 6) -> dict[str, torch.Tensor]:
    """Tensors of random dtypes and shapes; every element differs from its neighbours."""
    state: dict[str, torch.Tensor] = {}
    for number in range(tensors):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 4)))
        count = prod(shape)
        values = torch.tensor([rng.randint(0, 250) for _ in range(count)], dtype=torch.int64)
        state[f"layers.{number}.weight/master"] = values.to(rng.choice(DTYPES)).view(shape)
    return state


def random_layout(rng: random.Random, state: dict[str, torch.Tensor], most_ranks: int = 8) -> FakeLayout:
    """A layout of at most `most_ranks` ranks, odd degrees and empty shards included."""
    while True:
        layout = FakeLayout(rng.randint(1, most_ranks), rng.randint(1, 4), rng.randint(1, 4))
        if layout.world_size <= most_ranks:
            break
    for key, tensor in state.items():
        axis = rng.choice([None, *range(tensor.dim())])
        size = tensor.shape[axis] if axis is not None else 0
        layout.axis[key] = axis
        layout.cuts[key] = [0, *sorted(rng.randint(0, size) for _ in range(layout.tp - 1)), size]
        layout.stage[key] = rng.randrange(layout.pp)
        for tp in range(layout.tp):
            count = prod(box_of(layout, key, tensor, tp)[1])
            cuts = sorted(rng.randint(0, count) for _ in range(layout.dp - 1))
            layout.zero_cuts[(key, tp)] = [0, *cuts, count]
    return layout


def box_of(
    layout: FakeLayout, key: str, tensor: torch.Tensor, tp: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) of a tensor-parallel rank's slice."""
    axis = layout.axis[key]
    start, shape = [0] * tensor.dim(), list(tensor.shape)
    if axis is not None:
        low, high = layout.cuts[key][tp : tp + 2]
        start[axis], shape[axis] = low, high - low
    return tuple(start), tuple(shape)


def pieces_of(
    layout: FakeLayout, state: dict[str, torch.Tensor], rank: int, *, empty: bool = False
) -> list[Piece]:
    """What a rank holds; with `empty`, filled with a wrong value for a load to overwrite."""
    pp, dp, tp = layout.coordinate(rank)
    pieces: list[Piece] = []
    for key, tensor in state.items():
        if layout.stage[key] != pp:
            continue
        start, shape = box_of(layout, key, tensor, tp)
        low, high = layout.zero_cuts[(key, 0 if layout.axis[key] is None else tp)][dp : dp + 2]
        index = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        flat = tensor[index].contiguous().view(-1)[low:high].clone()
        if empty:
            flat.fill_(77)
        replica = layout.axis[key] is None and tp > 0
        pieces.append(Piece(key, tuple(tensor.shape), start, shape, low, flat, owner=not replica))
    return pieces


def save_as(
    root: Path, layout: FakeLayout, state: dict[str, torch.Tensor], step: int, run_id: str = "run"
) -> Checkpoint:
    """Save a state as all ranks of a layout would, one after the other."""
    temporary = begin_save(root, step)
    for rank in range(layout.world_size):
        save_shard(temporary, rank, pieces_of(layout, state, rank))
    info = CheckpointInfo(
        run_id=run_id, recipe_digest="recipe", step=step, consumed_samples=8 * step, layout={"dp": layout.dp}
    )
    return commit_save(temporary, info, layout.world_size)[0]
