"""The recipe: what to train, free of any cluster. Frozen dataclasses, one docstring a field.

`None` and "auto" mean "decided by `resolve` or by the planner"; `config/job.py` fills them in. The YAML key
of a field is its name, but for the ones in `YAML_NAMES` (Python keywords and clashes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from llmtrain.config.fields import (
    Bounds,
    Count,
    Duration,
    Fraction,
    Name,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    RelativeTo,
)

Auto = Literal["auto"]
Seed = Annotated[int, Bounds(low=0, high=2**32)]

YAML_NAMES: dict[str, str] = {"global_size": "global"}
"""Python field name -> key in YAML and in `--set`, where the two differ."""

EXTRA_KEYS: dict[str, tuple[str, ...]] = {"ModelConfig": ("from",)}
"""Keys of a section that are no fields: `model.from` names a `config.json` that stands for the other keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: PositiveFloat = 10000.0
    """Base of the frequencies."""
    scaling: Literal["none", "linear", "llama3"] = "none"
    """How frequencies are stretched for longer sequences."""
    factor: Annotated[float, Bounds(low=1)] = 1.0
    """Stretch factor of `scaling`."""
    low_frequency_factor: PositiveFloat = 1.0
    """Llama 3 scaling only."""
    high_frequency_factor: PositiveFloat = 4.0
    """Llama 3 scaling only."""
    original_sequence: PositiveInt = 8192
    """Llama 3 scaling only: sequence length before stretching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the decoder-only transformer."""

    kind: Literal["gpt", "llama", "moe"]
    """Family: sets the defaults of norm, activation, biases and positions."""
    layers: PositiveInt
    """Number of transformer blocks."""
    hidden: PositiveInt
    """Width of the residual stream."""
    heads: PositiveInt
    """Number of query heads."""
    kv_heads: PositiveInt | None = None
    """Number of key/value heads (grouped-query attention); default: heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; default: hidden / heads."""
    ffn_hidden: PositiveInt | None = None
    """Width inside the feed-forward block.

    Default 4 x hidden (gpt), 8/3 x hidden rounded up to 256 (llama, moe).
    """
    vocab: PositiveInt = 256
    """Vocabulary size; 256 is the built-in byte tokenizer."""
    sequence: PositiveInt
    """Tokens in one training sequence."""
    norm: Literal["layernorm", "rmsnorm"] | None = None
    """Default: layernorm (gpt), rmsnorm (llama, moe)."""
    norm_epsilon: PositiveFloat = 1e-5
    """Added to the variance."""
    activation: Literal["gelu", "swiglu"] | None = None
    """Default: gelu (gpt), swiglu (llama, moe)."""
    qkv_bias: bool | None = None
    """Bias on the query/key/value projection; default: as `bias`."""
    bias: bool | None = None
    """Bias on the other linear layers; default: true (gpt), false (llama, moe)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head."""
    rope: RopeConfig | None = None
    """Rotary positions; default: theta 10000 (llama, moe), none, i.e. learned positions (gpt)."""
    tie_embeddings: bool | None = None
    """Share the embedding with the output head; default: true (gpt), false (llama, moe)."""
    experts: PositiveInt | None = None
    """Mixture of experts: number of experts a layer (moe only)."""
    experts_per_token: PositiveInt | None = None
    """Mixture of experts: experts a token is sent to (moe only)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    corpus: Annotated[str, RelativeTo(keywords=("python-stdlib",))] = "python-stdlib"
    """`python-stdlib` (the standard library's own source files), a text or jsonl file, a folder, or a folder
    that `llmtrain data prepare` wrote.
    """
    tokenizer: Annotated[str, RelativeTo(keywords=("bytes",))] = "bytes"
    """`bytes` or the path of a Hugging Face `tokenizer.json`."""
    validation_fraction: Fraction = 0.01
    """Share of documents held out, chosen by hash."""
    validation_every: NaturalInt = 50
    """Steps between two validations; 0 switches validation off."""
    validation_sequences: PositiveInt = 32
    """Sequences in one validation pass, always the same ones."""


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
    """Activation checkpointing: selective recomputes the attention core only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Master weights, gradient accumulation and optimizer states are always FP32."""

    mode: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] = "bf16"
    """Format of the forward and backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"
    """The only optimizer."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NaturalFloat = 0.1
    """Applied to matrices and embeddings, not to norms and biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateConfig:
    """Linear warm-up, then a cosine to `final`."""

    peak: PositiveFloat = 3e-4
    """Highest rate."""
    final: NaturalFloat | None = None
    """Rate at the last step; default: peak / 10."""
    warmup_steps: NaturalInt = 0
    """Steps from zero to the peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Gradient clipping."""

    norm: NaturalFloat = 1.0
    """Largest global norm; 0 switches clipping off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every_steps: PositiveInt | None = None
    """Steps between two checkpoints; default: none by step."""
    every: Duration = 1800.0
    """Seconds between two checkpoints (duration, e.g. `30m`); 0 switches the timer off."""
    keep: PositiveInt = 3
    """Newest checkpoints kept; at least 1."""
    keep_every_steps: PositiveInt | None = None
    """Besides these, checkpoints whose step is a multiple of it are kept for ever; default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityConfig:
    """What to do about bad numbers."""

    nonfinite: Literal["stop"] = "stop"
    """A loss or gradient that is not finite stops the run before the weights change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """How failures are met."""

    node_loss_budget: Fraction = 0.2
    """Share of the nodes at launch that may be lost before the run stops with exit code 93."""
    restarts_without_progress: PositiveInt = 3
    """Restarts in a row without a newer checkpoint or a higher step, before the run stops with exit 93."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long to train and from which seed."""

    steps: Count | None = None
    """Optimizer steps; give this or `tokens`."""
    tokens: Count | None = None
    """Tokens; rounded up to whole steps."""
    seed: Seed = 0
    """Seed of weights and data order."""


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
