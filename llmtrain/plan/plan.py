"""The plan: what `make_plan` returns and `plan --json` prints. Bytes, seconds and FLOPs; ratios in 0..1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    error: float
    """Half-width of the band that the step time lies in with nine chances out of ten, as a share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One step in seconds; the exposed parts add up to the step."""

    forward: float
    backward: float
    recompute: float
    head: float
    """Embedding, output head and loss."""
    tensor: float
    context: float
    expert: float
    pipeline: float
    """Exposed stage-to-stage transfers."""
    bubble: float
    data: float
    """Exposed gradient reduction and weight gathering."""
    optimizer: float
    overhead: float
    tensor_hidden: float
    context_hidden: float
    pipeline_hidden: float
    data_hidden: float

    @property
    def compute(self) -> float:
        """Kernels that a single accelerator would run too."""
        return self.forward + self.backward + self.recompute + self.head

    @property
    def exposed(self) -> float:
        """Communication that the step waits for."""
        return self.tensor + self.context + self.expert + self.pipeline + self.data

    @property
    def hidden(self) -> float:
        """Communication that runs beside compute."""
        return self.tensor_hidden + self.context_hidden + self.pipeline_hidden + self.data_hidden

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed + self.bubble + self.optimizer + self.overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout with its batch split and prediction."""

    layout: Layout
    global_batch: int
    accumulation: int
    """Micro-batches of the busiest replica."""
    predicted: Prediction
    parts: Breakdown
    """The step as a sum."""
    wire_bytes: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Bytes that the first rank sends in a step, by axis; counted for the plans that are shown."""


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
class Reliability:
    """What failures make of the plan, from the profile's failure rate."""

    mtbf_seconds: float
    """Between two failures of any node in use."""
    failures: float
    """Expected over the whole training."""
    spares: int
    """Nodes that replace failed ones in 95 of 100 cases while those are repaired."""
    checkpoint_bytes: float
    checkpoint_seconds: float
    checkpoint_interval: float
    """Seconds between checkpoints that lose least (Daly 2006, higher order)."""
    goodput: float
    """Share of the time that moves training forward."""
    days: float
    """Days to the end, lost time included."""
    snapshot_bytes_per_node: float
    """Host memory that one copy of the states of a node's ranks takes."""
    host_bytes_per_node: float
    """Host memory of all copies at once: saves beside the training, and the memory tier."""
    survives: str
    """What may fail without a way back to the disk."""
    price: float | None
    """Of all accelerator hours, lost time and spares included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedGroup:
    """Layouts refused by one rule."""

    rule: str
    count: int
    example: str
    """The violated inequality of the first one, with both numbers."""
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plans, best first, the ladder, and what is wrong."""

    model: ModelSize
    plans: tuple[Candidate, ...]
    ladder: tuple[Rung, ...]
    problems: tuple[Problem, ...]
    front: tuple[Candidate, ...]
    """Pareto front of speed and memory, fastest first."""
    refused: tuple[RefusedGroup, ...]
    """Largest group first."""
    evaluated: int
    """Layouts looked at."""
    reliability: Reliability
    """Of the first plan."""
    proposals: tuple[Proposal, ...] = ()
    """What comes nearest to the recipe's `request`."""
    gpus_per_node: int
    """Ranks that a full node holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan that comes near a request."""

    title: str
    candidate: Candidate
