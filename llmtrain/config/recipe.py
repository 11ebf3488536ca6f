"""The recipe: what to train, free of any cluster. Frozen dataclasses, one docstring a field.

`None` and "auto" mean "decided by `resolve` or by the planner"; `config/job.py` fills them in. The YAML key of a field is
its name, but for the ones in `YAML_NAMES` (Python keywords and clashes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Auto = Literal["auto"]

YAML_NAMES: dict[str, str] = {"global_size": "global"}
"""Python field name -> key in YAML and in `--set`, where the two differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    """Base of the frequencies."""
    scaling: Literal["none", "linear", "llama3"] = "none"
    """How frequencies are stretched for longer sequences."""
    factor: float = 1.0
    """Stretch factor of `scaling`."""
    low_frequency_factor: float = 1.0
    """Llama 3 scaling only."""
    high_frequency_factor: float = 4.0
    """Llama 3 scaling only."""
    original_sequence: int = 8192
    """Llama 3 scaling only: sequence length before stretching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the decoder-only transformer."""

    kind: Literal["gpt", "llama", "moe"]
    """Family: sets the defaults of norm, activation, biases and positions."""
    layers: int
    """Number of transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key/value heads (grouped-query attention); default: heads."""
    head_dim: int | None = None
    """Width of one head; default: hidden / heads."""
    ffn_hidden: int | None = None
    """Width inside the feed-forward block; default 4 x hidden (gpt), 8/3 x hidden rounded up to 256 (llama, moe)."""
    vocab: int = 256
    """Vocabulary size; 256 is the built-in byte tokenizer."""
    sequence: int
    """Tokens in one training sequence."""
    norm: Literal["layernorm", "rmsnorm"] | None = None
    """Default: layernorm (gpt), rmsnorm (llama, moe)."""
    norm_epsilon: float = 1e-5
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
    experts: int | None = None
    """Mixture of experts: number of experts a layer (moe only)."""
    experts_per_token: int | None = None
    """Mixture of experts: experts a token is sent to (moe only)."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    corpus: str = "python-stdlib"
    """`python-stdlib` (the standard library's own source files), a text or jsonl file, a folder, or a folder that
    `llmtrain data prepare` wrote."""
    tokenizer: str = "bytes"
    """`bytes` or the path of a Hugging Face `tokenizer.json`."""
    validation_fraction: float = 0.01
    """Share of documents held out, chosen by hash."""
    validation_every: int = 50
    """Steps between two validations; 0 switches validation off."""
    validation_sequences: int = 32
    """Sequences in one validation pass, always the same ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroRange:
    """Bounds inside which the engine may choose the micro-batch."""

    min: int = 1
    """Smallest micro-batch, in sequences."""
    max: int
    """Largest micro-batch, in sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batch sizes, in sequences. global = sum over replicas of micro x accumulation."""

    global_size: int
    """Sequences per optimizer step over all replicas (YAML key: `global`)."""
    micro: int | Auto | MicroRange = "auto"
    """Sequences per forward."""
    accumulation: int | Auto = "auto"
    """Micro-batches per replica and optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of the parallel axes and what goes with them; "auto" leaves the choice to the planner."""

    dp: int | Auto = "auto"
    """Data-parallel replicas."""
    tp: int | Auto = "auto"
    """Tensor-parallel ranks, inside one node."""
    pp: int | Auto = "auto"
    """Pipeline stages."""
    vpp: int | Auto = "auto"
    """Model chunks per pipeline rank (interleaving)."""
    cp: int | Auto = "auto"
    """Context-parallel ranks."""
    ep: int | Auto = "auto"
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
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Applied to matrices and embeddings, not to norms and biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateConfig:
    """Linear warm-up, then a cosine to `final`."""

    peak: float = 3e-4
    """Highest rate."""
    final: float | None = None
    """Rate at the last step; default: peak / 10."""
    warmup_steps: int = 0
    """Steps from zero to the peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Gradient clipping."""

    norm: float = 1.0
    """Largest global norm; 0 switches clipping off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every_steps: int | None = None
    """Steps between two checkpoints; default: none by step."""
    every: float = 1800.0
    """Seconds between two checkpoints (duration, e.g. `30m`); 0 switches the timer off."""
    keep: int = 3
    """Newest checkpoints kept; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityConfig:
    """What to do about bad numbers."""

    nonfinite: Literal["stop"] = "stop"
    """A loss or gradient that is not finite stops the run before the weights change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """How failures are met."""

    node_loss_budget: float = 0.2
    """Share of the nodes at launch that may be lost before the run stops with exit code 93."""
    restarts_without_progress: int = 3
    """Restarts in a row without a newer checkpoint or a higher step, before the run stops with exit code 93."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long to train and from which seed."""

    steps: int | None = None
    """Optimizer steps; give this or `tokens`."""
    tokens: int | None = None
    """Tokens; rounded up to whole steps."""
    seed: int = 0
    """Seed of weights and data order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to train."""

    name: str
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
