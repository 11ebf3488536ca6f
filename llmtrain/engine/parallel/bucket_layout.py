"""Lay parameters into flat buckets: which go together, in which order, and what each replica keeps of
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from llmtrain.engine.model.parameters import ModelParameter
from llmtrain.engine.parallel.buckets import Bucket, Buckets, Run, Slot
from llmtrain.engine.parallel.groups import Group, Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How buckets are stored."""

    zero: int
    """ZeRO stage: 1 shards the optimizer state over the replicas, 0 does not."""
    dtype: torch.dtype
    """Compute format of the parameters."""
    device: torch.device
    bucket_bytes: int
    """FP32 gradient bytes that a bucket aims at; a larger parameter gets a bucket of its own."""


def build_buckets(parameters: Sequence[ModelParameter], groups: Groups, storage: Storage) -> Buckets:
    """Lay the parameters, given in forward order, into buckets in the order of the backward pass.

    Parameters whose gradients are also summed over another group (`Bucket.beyond`) get buckets of their own,
    which come last: they become ready last (a norm of the first block, the embedding).
    """
    plain: list[list[ModelParameter]] = []
    partial: list[ModelParameter] = []
    shared: list[ModelParameter] = []
    size = 0
    for parameter in reversed(parameters):
        spec = parameter.spec
        if spec.shared_over_pp:
            shared.append(parameter)
        elif spec.partial_over_tp and groups.tp.size > 1:
            partial.append(parameter)
        else:
            if not plain or size + 4 * spec.numel > storage.bucket_bytes:
                plain.append([])
                size = 0
            plain[-1].append(parameter)
            size += 4 * spec.numel
    buckets = [_make_bucket(members, groups, None, storage) for members in plain]
    if partial:
        buckets.append(_make_bucket(partial, groups, groups.tp, storage))
    if shared:
        buckets.append(_make_bucket(shared, groups, groups.ends, storage))
    return Buckets(buckets)


def _make_bucket(
    members: list[ModelParameter], groups: Groups, beyond: Group | None, storage: Storage
) -> Bucket:
    slots = tuple(_slots(members))
    is_sharded = storage.zero >= 1 and groups.dp.size > 1
    parts = groups.dp.size if is_sharded else 1
    shard = -(-slots[-1].stop // parts)
    first = groups.dp.index * shard if is_sharded else 0

    def zeros(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=storage.device)

    flat, gradients = zeros(shard * parts, storage.dtype), zeros(shard * parts)
    for slot in slots:
        slot.parameter.data = flat[slot.start : slot.stop].view(slot.parameter.spec.shape)
    is_single_copy = is_sharded or groups.dp.index == 0
    # In FP32 the parameters are their own masters.
    master = flat[first : first + shard] if storage.dtype == torch.float32 else zeros(shard)
    return Bucket(
        slots=slots,
        replicas=groups.dp,
        sharded=is_sharded,
        beyond=beyond if beyond is not None and beyond.size > 1 else None,
        parameters=flat,
        gradients=gradients,
        master=master,
        exp_avg=zeros(shard),
        exp_avg_sq=zeros(shard),
        reduced=zeros(shard) if is_sharded else gradients,
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
