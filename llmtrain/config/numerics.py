"""The recipe's sections on numbers: precision, optimizer, learning rate, clipping, stability."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from llmtrain.config.fields import (
    Bounds,
    Duration,
    Fraction,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Share,
)

Percentile = Annotated[float, Bounds(low=0, high=100)]
Scale = Annotated[float, Bounds(low=2.0**3, high=2.0**24)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling, used by `precision.mode: fp16` alone. The loss is multiplied by the scale, so
    that small gradients do not vanish in FP16; the scale stays between 2^3 and 2^24."""

    initial: Scale = 2.0**16
    """Scale of the first step."""
    growth_steps: PositiveInt = 100
    """Steps in a row without overflow after which the scale is doubled; an overflow halves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrecisionConfig:
    """Layers with repeated overflow or underflow run in a wider format for a while, decided between steps."""

    adaptive: bool = True
    """Whether layers may change their format; does nothing in fp32 and tf32."""
    fallback: Literal["fp32", "bf16"] = "fp32"
    """Format of such a layer; bf16 has the range of fp32 and helps fp16 runs only."""
    strikes: PositiveInt = 3
    """Alarms of a layer, within `hold_steps` of each other, that move it to the fallback."""
    hold_steps: PositiveInt = 200
    """Steps without an alarm after which it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Master weights, gradient accumulation and optimizer states are always FP32."""

    mode: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] = "bf16"
    """Format of the forward and backward pass. tf32 is fp32 where there are no tensor cores for it."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Dynamic loss scaling (fp16)."""
    layers: LayerPrecisionConfig = field(default_factory=LayerPrecisionConfig)
    """Formats of single layers."""


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
    """Linear warm-up, then a cosine to `final`, or a constant, or a constant with a decay at the end."""

    peak: PositiveFloat = 3e-4
    """Highest rate."""
    final: NaturalFloat | None = None
    """Rate at the last step; default: peak / 10."""
    warmup_steps: NaturalInt = 0
    """Steps from zero to the peak."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; wsd (warmup-stable-decay) stays at the peak until the last `decay_steps`."""
    decay_steps: NaturalInt | None = None
    """Length of wsd's decay; default: a tenth of the training."""
    decay: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of wsd's decay: the share of the way to `final` grows with the steps, their root, or a cosine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Gradient clipping by the global norm."""

    norm: NaturalFloat = 1.0
    """Largest global norm; 0 switches clipping off."""
    percentile: Percentile | None = None
    """Let the threshold follow this percentile of the recent norms, between `lowest` and `norm`; default: the
    threshold is `norm`."""
    lowest: PositiveFloat = 0.1
    """Smallest threshold that follows a percentile."""
    window: PositiveInt = 100
    """Recent steps that the percentile is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """What the gradients of each layer look like: norm, largest value, shares outside FP16's range."""

    every: NaturalInt = 25
    """Steps between two looks; 0: only when something is wrong."""
    alarm_share: Share = 1e-3
    """Share of abnormal values in a layer's gradient that raises an alarm. Abnormal: not finite, or outside
    FP16's range; in fp16 also lost below its smallest subnormal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeConfig:
    """Spikes of the loss and of the gradient norm, against median and median absolute deviation (MAD)."""

    action: Literal["off", "log", "skip", "rewind"] = "log"
    """skip leaves the step's update out; rewind also goes back to the last memory snapshot and leaves out
    everything since."""
    window: Annotated[int, Bounds(low=8, high=4096)] = 64
    """Steps that a value is compared with."""
    threshold: PositiveFloat = 8.0
    """Deviations above the median (1.4826 x MAD: normal values' standard deviation) that are a spike."""
    patience: PositiveInt = 5
    """Spikes in a row, or rewinds without `stability.forgive_steps` clean steps between them, after which the
    new level is taken for normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionConfig:
    """Silent corruption: ranks compare checksums of parameters that should be identical."""

    every: NaturalInt = 0
    """Steps between two comparisons; 0 switches them off."""
    action: Literal["log", "recompute", "stop"] = "recompute"
    """recompute does the step again from the FP32 master weights, which also repairs the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityConfig:
    """What to do about bad numbers."""

    nonfinite: Literal["recover", "skip", "stop"] = "recover"
    """A loss or gradient that is not finite never reaches the weights. recover computes the step again in
    FP32 (which for that step needs the rank's weights in FP32, and activations twice as large), and skips it
    when that is not finite either; skip skips it at once; stop ends the run with exit code 93."""
    skipped_steps: PositiveInt = 3
    """Steps skipped in a row after which the run goes back to the last snapshot, or else checkpoint, and
    leaves out the data since."""
    rewinds: NaturalInt = 2
    """Such returns, without `forgive_steps` clean steps after one, before the run ends with exit code 93."""
    forgive_steps: PositiveInt = 100
    """Clean steps in a row after which earlier rewinds do not count any more."""
    snapshot_every: NaturalInt | None = None
    """Steps between two snapshots in host memory, 12 bytes a weight over the replicas; a checkpoint is one
    too. 0: none, checkpoints serve; default: 25 when spikes.action is rewind, else 0."""
    z_loss: NaturalFloat = 0.0
    """Weight of the squared log of the softmax's denominator, added to the training loss; 1e-4 is usual."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Gradients of each layer."""
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    """Spikes of loss and gradient norm."""
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)
    """Checksums between replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault made on purpose, to rehearse what happens then."""

    kind: Literal[
        "nan",
        "overflow",
        "bad_batch",
        "bit_flip",
        "slow",
        "slow_disk",
        "hang",
        "error",
        "stop",
        "kill",
        "full_disk",
        "out_of_memory",
    ]
    """nan: in a layer's output; overflow: a layer's gradient is infinite, as beyond FP16's range; bad_batch:
    the replica reads noise; bit_flip: one bit of the layer's weights on this rank flips.

    slow: the rank sleeps for `seconds` in the step; slow_disk: what it saves takes `seconds` longer to
    write; and in the run's first attempt only, hang: it does nothing any more; error: its code raises; stop,
    kill: the signal; full_disk: its saves find no room; out_of_memory: an allocation fails, once.
    """
    step: PositiveInt
    """Step that it begins in."""
    steps: PositiveInt = 1
    """Steps in a row that it hits."""
    rank: NaturalInt = 0
    """Rank that it hits; of bad_batch: a rank of the replica."""
    layer: NaturalInt = 0
    """Layer of the model, from 0; the rank must hold it. bad_batch needs none."""
    passes: PositiveInt = 1
    """Passes of a hit step that see it: 1 spares the pass in FP32, 2 does not."""
    seconds: Duration = 0.0
    """Of slow: how long it sleeps in each step; of slow_disk: in each save."""
