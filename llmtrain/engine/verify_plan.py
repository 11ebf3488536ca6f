"""Count the bytes of the engine's real model for a layout, without memory and without ranks.

`python -m llmtrain.engine.verify_plan` reads {job, layout, stages, micro_batches} as JSON from standard
input and writes {stages: [{stage, parameters, gradients, optimizer, activations, working}]} to standard
output. Everything is built as a rank builds it, on torch's meta device, with groups of the full size that
move nothing. The passes run in the order of the schedule until the stage has held as much as it ever does;
live storages are counted at every operation.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmtrain.config.codec import from_json
from llmtrain.config.job import JobSpec
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.engine.build import COMPUTE_TYPES, build_memory
from llmtrain.engine.device import Device
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.parallel.groups import DONE, Group, Groups, Pending
from llmtrain.engine.parallel.pipeline import build_stages
from llmtrain.parallel_dims import ParallelDims
from llmtrain.plan.memory.bucket_packing import default_bucket_bytes
from llmtrain.plan.timing.schedules import waiting_buffers
from llmtrain.plan.timing.timeline import Pass, fullest_passes

META = torch.device("meta")


@dataclass(slots=True)
class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages while it is on."""

    now: int = 0
    peak: int = 0
    coming_and_going: list[Tensor] = field(default_factory=list)
    """Tensors whose storage is allocated and freed in place (ZeRO-3)."""
    _known: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages that it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        gathered = sum(tensor.untyped_storage().nbytes() for tensor in self.coming_and_going)
        self.peak = max(self.peak, self.now + gathered)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._drop, key, size)
        self.now += size

    def ignore(self, tensor: Tensor) -> None:
        """Leave out a storage that lives as long as the counter."""
        self._known[tensor.untyped_storage()._cdata] = None

    def _drop(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


class SilentGroup(Group):
    """A group of the full size whose collectives move nothing."""

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Count, and leave the tensor as it is."""
        self._count("all_reduce", tensor)
        return DONE

    def start_all_gather(self, full: Tensor, part: Tensor) -> Pending:
        """Count, and leave the tensors as they are."""
        self._count("all_gather", full)
        return DONE

    def start_reduce_scatter(self, part: Tensor, full: Tensor) -> Pending:
        """Count, and leave the tensors as they are; `full` lives on until the wait."""
        self._count("reduce_scatter", full)
        return Pending(finish=partial(_let_go, full))


def _let_go(tensor: Tensor) -> None:
    """The last one to hold a tensor that is on its way."""


class _FlashAttention(torch.autograd.Function):
    """What a fused attention kernel keeps: query, key, value, output, one number a row, and its mask."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        rows = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        # A mask of booleans is made one of numbers, to be added to the scores, in each layer anew.
        added = [] if mask is None else [torch.empty(mask.shape, dtype=query.dtype, device=query.device)]
        ctx.save_for_backward(query, key, value, output, rows, *added)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
) -> Tensor:
    return _FlashAttention.apply(query, key, value, attn_mask)


def silent_groups(dims: ParallelDims, rank: int) -> Groups:
    """The groups of one rank of a world that is not there."""
    column = dims.group_of(rank, "pp")
    is_end = rank in (column[0], column[-1]) and len(column) > 1

    def group(axis: str, ranks: tuple[int, ...]) -> Group:
        return (SilentGroup if len(ranks) > 1 else Group)(axis, ranks, rank, None)

    replicas = group("dp", dims.group_of(rank, "dp"))
    return Groups(
        dims=dims,
        rank=rank,
        place=dims.coordinate(rank),
        world=group("world", tuple(range(dims.world_size))),
        tp=group("tp", dims.group_of(rank, "tp")),
        pp=group("pp", column),
        dp=replicas,
        ends=group("ends", (column[0], column[-1]) if is_end else (rank,)),
        levels=(replicas,),
    )


def count_stage(spec: JobSpec, layout: Layout, stage: int, micro_batches: int) -> dict[str, float]:
    """Bytes of a rank of one pipeline stage, by kind."""
    rank = layout.dims.rank(pp=stage)
    groups = silent_groups(layout.dims, rank)
    device = Device(META, "none")
    with META:
        stages = build_stages(spec.recipe.model, layout, groups)
    buckets = build_memory(stages, groups, layout, _with_bucket(spec), device)
    states = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for bucket in buckets.buckets:
        states["parameters"] += _bytes(bucket.own if bucket.gathers else bucket.parameters)
        states["gradients"] += sum(_bytes(errors) for errors in bucket.errors)
        if bucket.gradients is not None:
            states["gradients"] += _bytes(bucket.gradients)
        if bucket.gradients is None or bucket.sharded:
            states["gradients"] += _bytes(bucket.reduced)
        if bucket.master.dtype != bucket.parameters.dtype:
            states["optimizer"] += _bytes(bucket.master)
        states["optimizer"] += _bytes(bucket.exp_avg) + _bytes(bucket.exp_avg_sq)
    buckets.begin_step(micro_batches)
    counter = LiveBytes()
    counter.coming_and_going = [bucket.parameters for bucket in buckets.buckets if bucket.gathers]
    for bucket in buckets.buckets:
        for tensor in (bucket.parameters, bucket.gradients, bucket.reduced, bucket.master, bucket.own):
            if tensor is not None:
                counter.ignore(tensor)
    activations = _passes(spec, layout, stages, micro_batches, counter)
    return {"stage": stage, **states, "activations": activations, "working": counter.peak - activations}


def _with_bucket(spec: JobSpec) -> Recipe:
    """The recipe with the bucket size of the job's accelerator, not of the meta device."""
    parallel = spec.recipe.parallel
    bucket = parallel.bucket or default_bucket_bytes(on_cpu=spec.cluster.accelerator == "cpu")
    return replace(spec.recipe, parallel=replace(parallel, bucket=bucket))


def _passes(
    spec: JobSpec, layout: Layout, stages: list[ModelStage], micro_batches: int, counter: LiveBytes
) -> int:
    """Run the schedule until it is as full as it gets; return the bytes held before its last backward
    pass."""
    stage = stages[0].place.index % layout.pp
    kernels: Any = F
    original = kernels.scaled_dot_product_attention
    kernels.scaled_dot_product_attention = _flash_attention
    held = 0
    try:
        with counter:
            rank = _Rank(spec, layout, stages)
            received = [
                rank.new_activation()
                for _ in range(waiting_buffers(layout.schedule, layout.pp, layout.vpp, stage))
            ]
            for one in fullest_passes(layout.schedule, layout.pp, layout.vpp, micro_batches, stage):
                held = counter.now if one.work == "backward" else held
                rank.run(one)
    finally:
        kernels.scaled_dot_product_attention = original
    del received
    return held


class _Rank:
    """Runs passes as torch's pipeline stages do, and holds what those hold between them."""

    def __init__(self, spec: JobSpec, layout: Layout, stages: list[ModelStage]) -> None:
        self._model, self._packs = spec.recipe.model, spec.recipe.data.packing == "documents"
        self._layout, self._stages = layout, stages
        self._dtype = COMPUTE_TYPES[spec.recipe.precision.mode]
        self._results: dict[tuple[int, int], Tensor] = {}
        self._put_off: dict[tuple[int, int], Callable[[], None]] = {}

    def new_activation(self, *, trained: bool = False) -> Tensor:
        """What one stage hands to another."""
        share = self._layout.tp if self._layout.sequence_parallel else 1
        shape = (self._model.sequence // share, self._layout.micro_batch, self._model.hidden)
        return torch.empty(shape, dtype=self._dtype, device=META, requires_grad=trained)

    def run(self, one: Pass) -> None:
        """Run one pass."""
        key, part = (one.chunk, one.micro_batch), self._stages[one.chunk // self._layout.pp]
        if one.work == "forward":
            self._results[key] = self._forward(part)
        elif one.work == "weight":
            self._put_off.pop(key)()
        else:
            result = self._results.pop(key)
            result.backward(torch.empty_like(result))
            if part.tp.put_off is not None:
                self._put_off[key] = part.tp.put_off.take()

    def _forward(self, part: ModelStage) -> Tensor:
        """One micro-batch through one stage; the last one's result is its loss."""
        tokens = torch.empty(self._layout.micro_batch, part.model.sequence, dtype=torch.int64, device=META)
        positions = torch.empty_like(tokens) if self._packs else None
        hidden = part(tokens if part.place.is_first else self.new_activation(trained=True), positions)
        return part.losses(hidden, tokens).mean() if part.place.is_last else hidden


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def main() -> None:
    """Read the request, count, write the answer."""
    request = json.load(sys.stdin)
    spec = from_json(JobSpec, request["job"])
    layout = from_json(Layout, request["layout"])
    found = [count_stage(spec, layout, stage, request["micro_batches"]) for stage in request["stages"]]
    json.dump({"stages": found}, sys.stdout)


if __name__ == "__main__":
    main()
