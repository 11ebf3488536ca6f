"""The recipe's sections on numbers: precision, optimizer, learning rate, clipping, stability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmtrain.config.fields import (
    Fraction,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
)


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
class StabilityConfig:
    """What to do about bad numbers."""

    nonfinite: Literal["stop"] = "stop"
    """A loss or gradient that is not finite stops the run before the weights change."""
