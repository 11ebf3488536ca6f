"""Build the parts of a training in order: groups, stages, buckets, optimizer, passes, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.corpus.corpora import documents_of, training_samples
from llmtrain.corpus.samples import Windows
from llmtrain.engine.data import Batches, TrainingBatches, ValidationBatches
from llmtrain.engine.device import Device, prepare_numerics
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.numerics.guard import Guard
from llmtrain.engine.optimizer import ShardedAdamW
from llmtrain.engine.parallel.bucket_layout import Storage, build_buckets
from llmtrain.engine.parallel.buckets import Buckets
from llmtrain.engine.parallel.collectives import WeightGradients
from llmtrain.engine.parallel.groups import Groups, build_groups
from llmtrain.engine.parallel.pipeline import Passes, PipelinePass, SinglePass, build_stages
from llmtrain.plan.layouts.supported import check_supported
from llmtrain.plan.micro_batch import choices

COMPUTE_TYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(slots=True, kw_only=True)
class Parts:
    """All that a rank trains with. Only the micro-batch, and what follows from it, ever changes."""

    recipe: Recipe
    layout: Layout
    device: Device
    groups: Groups
    stages: Sequence[ModelStage]
    buckets: Buckets
    optimizer: ShardedAdamW
    passes: Passes
    batches: Batches
    guard: Guard
    validation: ValidationBatches | None
    validation_for: Callable[[Layout], ValidationBatches | None]

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return int(self.recipe.train.steps or 0)

    def use_micro_batch(self, size: int) -> None:
        """Go on with another micro-batch; for all ranks together, between two steps."""
        self.layout = replace(self.layout, micro_batch=size)
        self.passes.use_micro_batch(size)
        self.batches.use_micro_batch(size)
        self.validation = self.validation_for(self.layout)


def build_parts(
    recipe: Recipe,
    layout: Layout,
    rank: int,
    device: Device,
    *,
    train: Sequence[Windows],
    validation: Sequence[Windows],
    ranks_per_node: int = 0,
) -> Parts:
    """Build everything but the weights' values. Every rank of the world must call it, after the process
    group is up. `ranks_per_node` says which ranks share a node; 0: nobody asks.

    Raises ConfigError with all that the engine cannot run.
    """
    check_supported(recipe, layout)
    prepare_numerics(device, recipe.precision.mode)
    two_levels = recipe.parallel.two_level_reduction
    groups = build_groups(layout.dims, rank, ranks_per_node, two_levels=two_levels)
    share_host_memory(recipe, layout, groups, device)
    stages = build_stages(recipe.model, layout, groups)
    buckets = build_memory(stages, groups, layout, recipe, device)
    validation_for = partial(build_validation, recipe, groups=groups, sources=validation)
    optimizer = ShardedAdamW(recipe.optimizer, buckets, fused=device.fused_adamw)
    return Parts(
        recipe=recipe,
        layout=layout,
        device=device,
        groups=groups,
        stages=stages,
        buckets=buckets,
        optimizer=optimizer,
        passes=build_passes(stages, groups, layout, mode=recipe.precision.mode, device=device),
        batches=build_batches(recipe, layout, groups, train),
        guard=Guard(recipe, layout, stages, buckets=buckets, optimizer=optimizer, groups=groups),
        validation=validation_for(layout),
        validation_for=validation_for,
    )


def share_host_memory(recipe: Recipe, layout: Layout, groups: Groups, device: Device) -> None:
    """Where tensors lie in host memory, let ranks of one host exchange activations, and what all agree on,
    there."""
    if not device.is_host_memory:
        return
    width = recipe.model.hidden * COMPUTE_TYPES[recipe.precision.mode].itemsize
    groups.tp.use_shared_memory(choices(recipe, layout)[-1] * recipe.model.sequence * width)
    groups.world.use_shared_memory(1024)


def build_batches(
    recipe: Recipe, layout: Layout, groups: Groups, sources: Sequence[Windows]
) -> TrainingBatches:
    """This replica's share of every global batch, over one corpus or the recipe's blend."""
    return TrainingBatches(training_samples(sources, recipe), recipe.batch, layout, groups.place.dp)


def build_memory(
    stages: Sequence[ModelStage], groups: Groups, layout: Layout, recipe: Recipe, device: Device
) -> Buckets:
    """Give the stages' parameters their place in flat buckets, and let a zero-bubble schedule put weight
    gradients off."""
    storage = Storage(
        zero=layout.zero,
        dtype=COMPUTE_TYPES[recipe.precision.mode],
        device=device.torch_device,
        bucket_bytes=round(recipe.parallel.bucket) if recipe.parallel.bucket else device.bucket_bytes,
        communication=recipe.parallel.gradient_communication,
    )
    buckets = build_buckets(stages, groups, storage)
    for stage in stages:
        if recipe.train.compile:
            device.compile_modules(stage.blocks)
        stage.place_tables(device.torch_device)
        stage.z_loss = recipe.stability.z_loss
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
    recipe: Recipe, layout: Layout, groups: Groups, sources: Sequence[Windows]
) -> ValidationBatches | None:
    """This replica's validation sequences; None when validation is off or nothing was held out."""
    data = recipe.data
    if not data.validation_every or not any(source.windows(recipe.model.sequence) for source in sources):
        return None
    return ValidationBatches(
        sources,
        [part.weight for part in data.parts],
        sequence=recipe.model.sequence,
        sequences=data.validation_sequences,
        layout=layout,
        replica=groups.place.dp,
        documents=documents_of(sources, data),
    )
