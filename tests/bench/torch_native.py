"""What PyTorch itself offers for dp x tp x pp, as a reference for `tests.bench.engine_cpu`: DTensor's
`parallelize_module`, `fully_shard` and `torch.distributed.pipelining`, put together as documented.

The model is the plain reference's; weights, data, precision and optimizer are the bench's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.plan.timing.schedules import split_layers
from tests.support.plain_loop import PlainModel, names

SPLITS = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
    **{name: RowwiseParallel() for name in ("o", "down")},
}


class NativeStage(nn.Module):
    """One pipeline rank's part of the plain model."""

    def __init__(self, model: PlainModel, layout: Layout, index: int) -> None:
        super().__init__()
        counts = split_layers(len(model.blocks), layout.pp)
        first = sum(counts[:index])
        self.blocks = nn.ModuleDict(
            {str(layer): model.blocks[layer] for layer in range(first, first + counts[index])}
        )
        self.angles = model.angles
        self.embedding = model.embedding if index == 0 else None
        is_last = index == layout.pp - 1
        self.norm: nn.Module | None = model.norm if is_last else None
        self.head: nn.Module | None = model.head if is_last else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens or activations -> activations or logits."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for block in self.blocks.values():
            hidden = block(hidden, self.angles)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


class NativeTraining:
    """One rank's training."""

    def __init__(self, recipe: Recipe, initial: Mapping[str, Tensor], layout: Layout) -> None:
        self._mesh = init_device_mesh(
            "cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        self.replica = self._mesh["dp"].get_local_rank()
        whole, table = PlainModel(recipe.model), names(recipe.model)
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.copy_(initial[table[name]].view_as(parameter))
        self._index = self._mesh["pp"].get_local_rank()
        self._stage = NativeStage(whole, layout, self._index)
        self._split(layout)
        self._micro_batches = layout.micro_batches(recipe.batch.global_size)[self.replica]
        self._schedule = self._make_schedule(layout)
        decayed = [one for one in self._stage.parameters() if one.dim() > 1]
        others = [one for one in self._stage.parameters() if one.dim() == 1]
        optimizer = recipe.optimizer
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": optimizer.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate.peak,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            foreach=True,
        )
        self._limit = recipe.clip.norm

    def _split(self, layout: Layout) -> None:
        for block in self._stage.blocks.values():
            if layout.tp > 1:
                parallelize_module(block, self._mesh["tp"], dict(SPLITS))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in self._stage.blocks.values():
            fully_shard(block, mesh=self._mesh["dp"], mp_policy=policy)
        fully_shard(self._stage, mesh=self._mesh["dp"], mp_policy=policy)

    def _make_schedule(self, layout: Layout) -> Any:
        stage = PipelineStage(
            self._stage, self._index, layout.pp, torch.device("cpu"), group=self._mesh["pp"].get_group()
        )
        return Schedule1F1B(stage, self._micro_batches, loss_fn=_mean_loss)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One step on this replica's [m b, s] tokens; return the mean loss over all replicas."""
        losses: list[Tensor] = []
        inputs = (tokens,) if self._stage.embedding is not None else ()
        goals = {"target": targets, "losses": losses} if self._stage.head is not None else {}
        self._schedule.step(*inputs, **goals)
        own = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        shares = self._mesh["dp"].size() * self._mesh["tp"].size()
        numbers = torch.stack((own.double() / shares, self._squared_norm()))
        dist.all_reduce(numbers)
        loss, squared = numbers.tolist()
        factor = min(1.0, self._limit / (squared**0.5 + 1e-6))
        for parameter in self._stage.parameters():
            if factor < 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._adamw.step()
        self._adamw.zero_grad()
        return float(loss)

    def _squared_norm(self) -> Tensor:
        """This rank's share of the squared norm; what all tensor-parallel ranks hold counts once."""
        total = torch.zeros((), dtype=torch.float64)
        first = self._mesh["tp"].get_local_rank() == 0
        for parameter in self._stage.parameters():
            if isinstance(parameter.grad, DTensor):
                split = "tp" in (parameter.grad.device_mesh.mesh_dim_names or ())
                if split or first:
                    total += parameter.grad.to_local().double().square().sum()
        return total


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def time_native(
    training: NativeTraining, fetch: Any, steps: range, clock: Any
) -> tuple[float, list[float], list[float]]:
    """CPU-seconds of the steps after the warm-up (`steps.start`), wall seconds, and all losses."""
    losses, walls, spent = [], [], 0.0
    for step in range(1, steps.stop):
        before, started = clock(), time.perf_counter()
        batch = fetch(step)
        losses.append(training.step(batch.tokens, batch.targets))
        if step >= steps.start:
            spent += clock() - before
            walls.append(time.perf_counter() - started)
    return spent, walls, losses
