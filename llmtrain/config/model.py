"""The recipe's `model` section: the shape of the decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from llmtrain.config.fields import (
    Bounds,
    PositiveFloat,
    PositiveInt,
)


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
