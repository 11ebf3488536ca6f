"""Parameters in a wider format for a while: gathered from the FP32 masters, in place of the compute weights.

It costs 4 bytes for every weight of the buckets concerned, on every rank, and one gather over the replicas:
for a whole step in FP32 all buckets of the rank, for single layers those that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from llmtrain.engine.model.block import Block
from llmtrain.engine.model.parameters import ModelParameter
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.model.weights import WeightsInPlace
from llmtrain.engine.numerics.layer_names import block_name, layer_of
from llmtrain.engine.parallel.buckets import Bucket, Buckets


@contextmanager
def everything_in_fp32(stages: Sequence[ModelStage], buckets: Buckets) -> Iterator[None]:
    """All parameters of the rank are FP32 masters inside. Every rank of the replicas' groups must enter."""
    brought = [stage.weights for stage in stages]
    for stage in stages:
        stage.weights = WeightsInPlace()
    try:
        with _replaced(buckets, lambda _: True, torch.float32):
            yield
    finally:
        for stage, weights in zip(stages, brought, strict=True):
            stage.weights = weights


@contextmanager
def layers_in(
    stages: Sequence[ModelStage], buckets: Buckets, layers: Sequence[str], dtype: torch.dtype
) -> Iterator[None]:
    """The given layers (blocks) compute in a format of their own inside. Every rank of the replicas' groups
    must enter with the same layers."""
    if not layers:
        yield
        return
    blocks = [block for stage in stages for block in _blocks(stage, layers)]
    for block in blocks:
        block.dtype = dtype
    try:
        with _replaced(buckets, lambda one: layer_of(one.spec.pieces[0].name) in layers, dtype):
            yield
    finally:
        for block in blocks:
            block.dtype = None


def _blocks(stage: ModelStage, layers: Sequence[str]) -> Iterator[Block]:
    for number, block in enumerate(stage.blocks, stage.place.first_layer):
        if block_name(number) in layers and isinstance(block, Block):
            yield block


@contextmanager
def _replaced(
    buckets: Buckets, chosen: Callable[[ModelParameter], bool], dtype: torch.dtype
) -> Iterator[None]:
    """Parameters of a choice hold their masters in the given format inside."""
    before: list[tuple[ModelParameter, Tensor]] = []
    try:
        for bucket in buckets.buckets:
            slots = [slot for slot in bucket.slots if chosen(slot.parameter)]
            if not slots:
                continue
            whole = whole_master(bucket).to(dtype)
            for slot in slots:
                before.append((slot.parameter, slot.parameter.data))
                slot.parameter.data = whole[slot.start : slot.stop].view(slot.parameter.spec.shape)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


def whole_master(bucket: Bucket) -> Tensor:
    """A bucket's FP32 masters, gathered from all replicas, [padded]."""
    if not bucket.sharded:
        return bucket.master
    whole = torch.empty(bucket.padded, dtype=torch.float32, device=bucket.master.device)
    bucket.replicas.start_all_gather(whole, bucket.master).wait()
    return whole
