"""What is trained, reduced to what the planner's arithmetic needs."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.config.recipe import Recipe
from llmtrain.plan.model_size import BlockShape, block_shape, flops_per_token, head_layers, is_tied
from llmtrain.plan.timing.schedules import split_layers, stage_layer_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, batch, number format and length of a training."""

    model: ModelConfig
    shape: BlockShape
    tied: bool
    sequence: int
    global_batch: int
    """Sequences a step."""
    mode: str
    """Precision mode."""
    steps: int
    flops_per_token: float
    communication: str = "fp32"
    """Format that gradients are reduced in."""
    bucket: float | None = None
    """FP32 bytes of gradients that are reduced in one call; None: the engine's default."""
    two_levels: bool = True
    """Whether gradients are summed inside each node first."""
    packs_documents: bool = False
    """Whether tokens attend within their own document only: attention then has a mask."""
    head_layers: tuple[float, float] = (0.0, 0.0)
    """Compute of the output head in layers, without and with full recomputation; layers are split over a
    pipeline so that the stage with the head gets fewer. Zeros where a framework splits evenly."""

    @property
    def is_rms_norm(self) -> bool:
        """Whether norms are RMSNorm, not LayerNorm."""
        return (self.model.norm or ("layernorm" if self.model.kind == "gpt" else "rmsnorm")) == "rmsnorm"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.sequence

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.mode in ("fp32", "tf32") else 2

    def chunk_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers of each pipeline chunk of a layout, in order."""
        return split_layers(self.model.layers, layout.pp, layout.vpp, self._head_layers(layout))

    def stage_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers of each pipeline stage of a layout, over all its chunks."""
        return stage_layer_counts(self.model.layers, layout.pp, layout.vpp, self._head_layers(layout))

    def _head_layers(self, layout: Layout) -> float:
        return self.head_layers[layout.recompute == "full"]


def make_workload(recipe: Recipe, framework: str = "llmtrain") -> Workload:
    """Reduce a resolved recipe; `framework` as in the profile's `software`."""
    model = recipe.model
    weights = (head_layers(model, "none"), head_layers(model, "full"))
    tokens = recipe.batch.global_size * model.sequence
    steps = recipe.train.steps or -(-(recipe.train.tokens or tokens) // tokens)
    return Workload(
        model=model,
        shape=block_shape(model),
        tied=is_tied(model),
        sequence=model.sequence,
        global_batch=recipe.batch.global_size,
        mode=recipe.precision.mode,
        steps=steps,
        flops_per_token=flops_per_token(model),
        communication=recipe.parallel.gradient_communication,
        bucket=recipe.parallel.bucket,
        two_levels=recipe.parallel.two_level_reduction,
        packs_documents=recipe.data.packing == "documents",
        head_layers=weights if framework == "llmtrain" else (0.0, 0.0),
    )
