"""The recipe: what to train, free of any cluster. Frozen dataclasses, one docstring a field.

`None` and "auto" mean "decided by `resolve` or by the planner"; `config/job.py` fills them in. The YAML key
of a field is its name, but for the ones in `YAML_NAMES` (Python keywords and clashes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from llmtrain.config.batch_ramp import BatchRamp, batch_at, samples_before
from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.config.data import DataConfig
from llmtrain.config.fields import Bounds, Bytes, Count, Duration, Fraction, Name, PositiveInt
from llmtrain.config.model import ModelConfig
from llmtrain.config.numerics import (
    ClipConfig,
    InjectedFault,
    LearningRateConfig,
    OptimizerConfig,
    PrecisionConfig,
    StabilityConfig,
)

Auto = Literal["auto"]
Seed = Annotated[int, Bounds(low=0, high=2**32)]

YAML_NAMES: dict[str, str] = {"global_size": "global"}
"""Python field name -> key in YAML and in `--set`, where the two differ."""

EXTRA_KEYS: dict[str, tuple[str, ...]] = {"ModelConfig": ("from",)}
"""Keys of a section that are no fields: `model.from` names a `config.json` that stands for the other keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroRange:
    """Bounds inside which the engine may choose the micro-batch."""

    min: PositiveInt = 1
    """Smallest micro-batch, in sequences."""
    max: PositiveInt
    """Largest micro-batch, in sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batch sizes, in sequences. global = sum over replicas of micro x accumulation."""

    global_size: PositiveInt
    """Sequences per optimizer step over all replicas (YAML key: `global`)."""
    micro: PositiveInt | Auto | MicroRange = "auto"
    """Sequences per forward."""
    accumulation: PositiveInt | Auto = "auto"
    """Micro-batches per replica and optimizer step."""
    ramp: BatchRamp | None = None
    """Growth of the global batch up to `global` at the start; plans are made for `global`. Default: none."""

    def at(self, step: int) -> int:
        """Sequences of a step, counted from 1, over all replicas."""
        return batch_at(self.ramp, self.global_size, step)

    def samples_before(self, step: int) -> int:
        """Samples of all steps before this one: the index of its first sample."""
        return samples_before(self.ramp, self.global_size, step)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch of the training, ascending."""
        return (*(self.ramp.sizes(self.global_size) if self.ramp else ()), self.global_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of the parallel axes and what goes with them; "auto" leaves the choice to the planner."""

    dp: PositiveInt | Auto = "auto"
    """Data-parallel replicas."""
    tp: PositiveInt | Auto = "auto"
    """Tensor-parallel ranks, inside one node."""
    pp: PositiveInt | Auto = "auto"
    """Pipeline stages."""
    vpp: PositiveInt | Auto = "auto"
    """Model chunks per pipeline rank (interleaving)."""
    cp: PositiveInt | Auto = "auto"
    """Context-parallel ranks."""
    ep: PositiveInt | Auto = "auto"
    """Expert-parallel ranks, a regrouping of dp x cp x tp."""
    zero: Literal[0, 1, 2, 3] | Auto = "auto"
    """ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 parameters too."""
    sequence_parallel: bool | Auto = "auto"
    """Shard norms and residuals along the sequence inside a tensor-parallel group."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] | Auto = "auto"
    """Pipeline schedule."""
    recompute: Literal["none", "selective", "full"] | Auto = "auto"
    """Activation checkpointing. `selective` keeps the results of the linear layers and of attention, and runs
    norms, rotary positions and the activation function again; `full` keeps the inputs of layers.
    """
    gradient_communication: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """Format that gradients are reduced over the replicas in; they are summed in FP32 in any case. `int8`:
    blocks of 128 with a scale each, and error feedback; 25.8 % of the bytes of `fp32`.
    """
    bucket: Bytes | None = None
    """FP32 bytes of gradients that are reduced in one call (e.g. `256 MB`); default: 256 MiB on GPUs, 16 MiB
    on CPUs.
    """
    two_level_reduction: bool = True
    """Whether gradients are summed inside each node first where several replicas share nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """How failures are met."""

    node_loss_budget: Fraction = 0.2
    """Share of the nodes at launch that may be lost before the run stops with exit code 93."""
    restarts_without_progress: PositiveInt = 3
    """Restarts in a row without a newer checkpoint or a higher step, before the run stops with exit 93."""
    standby: bool = True
    """Whether the next attempt's processes are started while an attempt trains, where the nodes' memory has
    room: they import torch and wait, so that a restart on the same nodes takes seconds. They hold no device
    memory, about 0.3 GB of host memory a rank, and no CPU."""
    standby_after: Duration = 30.0
    """Training time in an attempt before they are started; a training that ends soon after goes without."""
    slow_ranks: Literal["tell", "replace"] = "tell"
    """What follows when a rank stays slower than its peers for minutes. `tell`: it is named with its node;
    `replace`: a spare takes the node's place where there is one and the time gained until the next failure is
    expected to exceed `failures.restart`, else at the next restart; the node stays as the last spare."""
    inject: tuple[InjectedFault, ...] = ()
    """For rehearsals only: faults made on purpose, e.g. `--set 'faults.inject=[{kind: nan, step: 5}]'`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long to train and from which seed."""

    steps: Count | None = None
    """Optimizer steps; give this or `tokens`."""
    tokens: Count | None = None
    """Tokens; rounded up to whole steps."""
    seed: Seed = 0
    """Seed of weights and data order."""
    trace_steps: tuple[PositiveInt, ...] = ()
    """Steps that every rank traces, to `attempts/N/trace/`: what it computed when, and what it waited for."""
    compile: bool = False
    """Whether every rank compiles its layers with `torch.compile`: a minute at each start for faster steps on
    GPUs. Needs a C++ compiler on the nodes; not with tp > 1, zero-bubble or selective recomputation.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestConfig:
    """Numbers that somebody asked for, not yet checked against each other: `plan` says where they contradict
    arithmetic, the schedule or the memory, and what comes nearest. They decide nothing."""

    dp: PositiveInt
    """Data-parallel replicas."""
    tp: PositiveInt
    """Tensor-parallel ranks."""
    pp: PositiveInt
    """Pipeline stages."""
    micro: PositiveInt
    """Sequences per forward."""
    accumulation: PositiveInt
    """Micro-batches per replica and step."""
    global_size: PositiveInt
    """Global batch as it was written (YAML key: `global`); read as sequences, and as tokens."""
    bubble: Fraction
    """Largest share of a step that pipeline stages may idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to train."""

    name: Name
    """Short name; becomes part of the run id."""
    description: str = ""
    """One line for `llmtrain recipes`."""
    model: ModelConfig
    """Shape of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where tokens come from."""
    batch: BatchConfig
    """Batch sizes."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Degrees of the parallel axes."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    learning_rate: LearningRateConfig = field(default_factory=LearningRateConfig)
    """Learning-rate schedule."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """Gradient clipping."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    """Bad numbers."""
    faults: FaultConfig = field(default_factory=FaultConfig)
    """Failures."""
    train: TrainConfig
    """Length and seed."""
    request: RequestConfig | None = None
    """A request to check, beside what the recipe itself fixes."""
