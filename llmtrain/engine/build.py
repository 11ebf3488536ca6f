"""Build the parts of a training in order: groups, stages, buckets, optimizer, passes, batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.engine.data import TrainingBatches, ValidationBatches, Windows
from llmtrain.engine.device import Device, prepare_numerics
from llmtrain.engine.model.parameters import parameters_of
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.optimizer import ShardedAdamW
from llmtrain.engine.parallel.bucket_layout import Storage, build_buckets
from llmtrain.engine.parallel.buckets import Buckets
from llmtrain.engine.parallel.collectives import WeightGradients
from llmtrain.engine.parallel.groups import Groups, build_groups
from llmtrain.engine.parallel.pipeline import Passes, PipelinePass, SinglePass, build_stages
from llmtrain.plan.supported import check_supported

COMPUTE_TYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that a rank trains with."""

    recipe: Recipe
    layout: Layout
    device: Device
    groups: Groups
    stages: Sequence[ModelStage]
    buckets: Buckets
    optimizer: ShardedAdamW
    passes: Passes
    batches: TrainingBatches
    validation: ValidationBatches | None

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return int(self.recipe.train.steps or 0)

    @property
    def micro_batches_in_all(self) -> int:
        """Micro-batches of one step over all replicas."""
        return self.recipe.batch.global_size // self.layout.micro_batch


def build_parts(
    recipe: Recipe,
    layout: Layout,
    rank: int,
    device: Device,
    *,
    train: Windows,
    validation: Windows | None,
) -> Parts:
    """Build everything but the weights' values. Every rank of the world must call it, after the process
    group is up.

    Raises ConfigError with all that the engine cannot run.
    """
    check_supported(recipe, layout)
    prepare_numerics(device, recipe.precision.mode)
    groups = build_groups(layout.dims, rank)
    share_host_memory(recipe, layout, groups, device)
    stages = build_stages(recipe.model, layout, groups)
    buckets = build_memory(stages, groups, layout, recipe, device)
    batches = build_batches(recipe, layout, groups, train)
    return Parts(
        recipe=recipe,
        layout=layout,
        device=device,
        groups=groups,
        stages=stages,
        buckets=buckets,
        optimizer=ShardedAdamW(recipe.optimizer, buckets, fused=device.fused_adamw),
        passes=build_passes(stages, groups, layout, mode=recipe.precision.mode, device=device),
        batches=batches,
        validation=build_validation(recipe, layout, groups, validation),
    )


def share_host_memory(recipe: Recipe, layout: Layout, groups: Groups, device: Device) -> None:
    """Where tensors lie in host memory, let ranks of one host exchange activations, and what all agree on,
    there."""
    if not device.is_host_memory:
        return
    width = recipe.model.hidden * COMPUTE_TYPES[recipe.precision.mode].itemsize
    groups.tp.use_shared_memory(layout.micro_batch * recipe.model.sequence * width)
    groups.world.use_shared_memory(1024)


def build_batches(recipe: Recipe, layout: Layout, groups: Groups, source: Windows) -> TrainingBatches:
    """This replica's share of every global batch."""
    return TrainingBatches(
        source,
        sequence=recipe.model.sequence,
        global_batch=recipe.batch.global_size,
        seed=recipe.train.seed,
        layout=layout,
        replica=groups.place.dp,
    )


def build_memory(
    stages: Sequence[ModelStage], groups: Groups, layout: Layout, recipe: Recipe, device: Device
) -> Buckets:
    """Give the stages' parameters their place in flat buckets, and let a zero-bubble schedule put weight
    gradients off."""
    storage = Storage(
        zero=layout.zero,
        dtype=COMPUTE_TYPES[recipe.precision.mode],
        device=device.torch_device,
        bucket_bytes=device.bucket_bytes,
    )
    buckets = build_buckets(parameters_of(stages), groups, storage)
    for stage in stages:
        stage.place_tables(device.torch_device)
        if layout.schedule == "zero-bubble" and layout.pp > 1:
            stage.tp.put_off = WeightGradients(buckets.accumulate)
    return buckets


def build_passes(
    stages: Sequence[ModelStage],
    groups: Groups,
    layout: Layout,
    *,
    mode: str,
    device: Device,
) -> Passes:
    """The forward and backward passes: one loop, or a pipeline schedule."""
    if layout.pp == 1:
        return SinglePass(stages[0], layout.micro_batch, device)
    return PipelinePass(stages, groups, layout, dtype=COMPUTE_TYPES[mode], device=device)


def build_validation(
    recipe: Recipe, layout: Layout, groups: Groups, source: Windows | None
) -> ValidationBatches | None:
    """This replica's validation sequences; None when validation is off or nothing was held out."""
    data = recipe.data
    if source is None or not data.validation_every or not source.windows(recipe.model.sequence):
        return None
    return ValidationBatches(
        source,
        sequence=recipe.model.sequence,
        sequences=data.validation_sequences,
        layout=layout,
        replica=groups.place.dp,
    )
