"""The plan: what `make_plan` returns and `plan --json` prints. Bytes, seconds and FLOPs; ratios in 0..1."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.layout import Layout
from llmtrain.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """Memory of one rank by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    """Context, communication buffers, logits, allocator slack."""
    capacity: float

    @property
    def total(self) -> float:
        """Sum of the kinds."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a layout is predicted to do; the fullest rank's memory."""

    step_seconds: float
    tokens_per_second_per_gpu: float
    model_flops_per_gpu: float
    mfu: float
    hfu: float
    bubble_ratio: float
    communication_ratio: float
    exposed_communication_ratio: float
    memory: MemoryBytes
    train_days: float
    gpu_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout with its batch split and prediction."""

    layout: Layout
    global_batch: int
    accumulation: int
    """Micro-batches of the busiest replica."""
    predicted: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder: what runs when only `nodes` nodes are left."""

    nodes: int
    """Nodes available."""
    candidate: Candidate | None
    """None: nothing fits on so few nodes."""
    idle_nodes: int
    micro_batches: tuple[int, ...]
    """Per replica; uneven where dp does not divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Figures of the model alone."""

    parameters: int
    flops_per_token: float
    """Forward + backward, full attention square (the MFU convention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plans, best first, the ladder, and what is wrong."""

    model: ModelSize
    plans: tuple[Candidate, ...]
    ladder: tuple[Rung, ...]
    problems: tuple[Problem, ...]
