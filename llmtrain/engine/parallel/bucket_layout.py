"""Lay parameters into flat buckets: which go together, in which order, and what each replica keeps of
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from llmtrain.engine.model.parameters import ModelParameter
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.parallel.buckets import Bucket, Buckets, Run, Slot
from llmtrain.engine.parallel.gathering import GatheredWeights
from llmtrain.engine.parallel.groups import Groups
from llmtrain.engine.parallel.replicas import Replicas
from llmtrain.plan.memory.bucket_packing import PackedBucket, Packing, ParameterShape, shard_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How buckets are stored."""

    zero: int
    """ZeRO stage (`buckets.py`)."""
    dtype: torch.dtype
    """Compute format of the parameters."""
    device: torch.device
    bucket_bytes: int
    """FP32 gradient bytes that a bucket aims at; a larger parameter gets a bucket of its own."""
    communication: str = "fp32"
    """Format that gradients are reduced in."""


def build_buckets(stages: Sequence[ModelStage], groups: Groups, storage: Storage) -> Buckets:
    """Lay the stages' parameters into buckets in the order of the backward pass, and tell the stages how to
    come by their weights."""
    parameters: dict[int, ModelParameter] = {}
    shapes: list[ParameterShape] = []
    for chunk, stage in enumerate(stages):
        for site, members in enumerate(stage.sites()):
            for parameter in members:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = parameter
                    shapes.append(parameter_shape(parameter, groups, chunk, site))
    ordered = list(parameters.values())
    zero = storage.zero if groups.dp.size > 1 else 0
    replicas = Replicas(groups.levels, storage.communication)
    buckets = [
        _make_bucket(packed, [ordered[index] for index in packed.members], groups, replicas, storage)
        for packed in Packing(zero, storage.bucket_bytes).pack(shapes)
    ]
    if groups.dp.size > 1:
        by_parameter = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
        for stage in stages:
            sites = [_buckets_of(members, by_parameter) for members in stage.sites()]
            stage.weights = GatheredWeights(sites, starts_with_embedding=stage.place.is_first)
    return Buckets(buckets)


def parameter_shape(parameter: ModelParameter, groups: Groups, chunk: int, site: int) -> ParameterShape:
    """What packing needs to know of a parameter."""
    spec = parameter.spec
    is_partial = spec.partial_over_tp and groups.tp.size > 1
    kind = "shared" if spec.shared_over_pp else "partial" if is_partial else "plain"
    return ParameterShape(spec.numel, kind, not spec.decay, chunk, site)  # type: ignore[arg-type]


def _buckets_of(members: Sequence[ModelParameter], by_parameter: dict[int, Bucket]) -> list[Bucket]:
    found = {id(bucket): bucket for bucket in (by_parameter[id(parameter)] for parameter in members)}
    return list(found.values())


def _make_bucket(
    packed: PackedBucket,
    members: list[ModelParameter],
    groups: Groups,
    replicas: Replicas,
    storage: Storage,
) -> Bucket:
    slots = tuple(_slots(members))
    is_sharded = storage.zero >= 1 and replicas.size > 1
    parts = replicas.size if is_sharded else 1
    shard = shard_elements(slots[-1].stop, parts, replicas.communication)
    if not is_sharded:  # the two levels of an all-reduce cut it, too
        shard = -(-shard // replicas.size) * replicas.size
    first = replicas.index * shard if is_sharded else 0

    def zeros(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=storage.device)

    flat = zeros(shard * parts, storage.dtype)
    gradients = None if packed.releases else zeros(shard * parts)
    for slot in slots:
        slot.parameter.data = flat[slot.start : slot.stop].view(slot.parameter.spec.shape)
    own = zeros(shard, storage.dtype) if packed.gathers else flat[first : first + shard]
    if packed.gathers:
        flat.untyped_storage().resize_(0)
    is_single_copy = is_sharded or groups.dp.index == 0
    beyond = {"plain": None, "partial": groups.tp, "shared": groups.ends}[packed.kind]
    return Bucket(
        slots=slots,
        replicas=replicas,
        sharded=is_sharded,
        chunk=packed.chunk,
        releases=packed.releases,
        gathers=packed.gathers,
        beyond=beyond if beyond is not None and beyond.size > 1 else None,
        parameters=flat,
        gradients=gradients,
        own=own,
        # In FP32 the parameters are their own masters.
        master=own if storage.dtype == torch.float32 else zeros(shard),
        exp_avg=zeros(shard),
        exp_avg_sq=zeros(shard),
        reduced=zeros(shard) if is_sharded or gradients is None else gradients,
        errors=replicas.new_errors(shard * parts, storage.device) if is_sharded else [],
        first=first,
        runs=tuple(_runs(slots, first, first + shard, groups, is_single_copy)),
    )


def _slots(members: list[ModelParameter]) -> Iterator[Slot]:
    """Lay parameters end to end, those of one kind together, for few runs. The order must not depend on the
    rank: shards of a bucket are also summed between tensor-parallel ranks."""
    start = 0
    for parameter in sorted(members, key=lambda one: (not one.spec.decay, one.spec.replicated_over_tp)):
        yield Slot(parameter, start, start + parameter.spec.numel)
        start += parameter.spec.numel


def _counted(parameter: ModelParameter, groups: Groups) -> bool:
    spec = parameter.spec
    is_copy_of_tp = spec.replicated_over_tp and groups.tp.index > 0
    is_copy_of_pp = spec.shared_over_pp and groups.place.pp > 0
    return not is_copy_of_tp and not is_copy_of_pp


def _runs(
    slots: Sequence[Slot], first: int, stop: int, groups: Groups, is_single_copy: bool
) -> Iterator[Run]:
    """Merge neighbouring slots of one kind; the padding at the end, zero for ever, goes with the last."""
    start: int | None = None
    kind = (False, False)
    for slot in slots:
        low, high = max(slot.start, first), min(slot.stop, stop)
        if low >= high:
            continue
        own = (slot.parameter.spec.decay, is_single_copy and _counted(slot.parameter, groups))
        if start is not None and own != kind:
            yield Run(start - first, low - first, *kind)
            start = None
        if start is None:
            start, kind = low, own
    if start is not None:
        yield Run(start - first, stop - first, *kind)
