"""Parameters and FLOPs of a decoder-only transformer, from its shape alone.

`matrix` parameters are the weights that a token is multiplied with; vectors are norms and biases. FLOPs per
token count
2 per matrix weight forward, twice that backward, and attention over the full square (the MFU convention of
Korthikanti et al. 2022, appendix A), never recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from llmtrain.config.model import ModelConfig
from llmtrain.plan.plan import ModelSize


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Widths of one transformer block, nothing left to default."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    gated: bool
    experts: int
    """1 for a dense feed-forward block."""
    experts_per_token: int
    attention_matrix: int
    """Weights of the query, key, value and output projections."""
    expert_matrix: int
    """Weights of one feed-forward block or one expert."""
    router: int
    """Weights of the router; 0 when dense."""
    sharded_vector: int
    """Biases that tensor parallelism cuts (qkv and ffn-in)."""
    replicated_vector: int
    """Norms and biases that every tensor-parallel rank keeps."""

    @property
    def matrix(self) -> int:
        """All matrix weights of the block, every expert counted."""
        return self.attention_matrix + self.experts * self.expert_matrix + self.router

    @property
    def active_matrix(self) -> int:
        """Matrix weights that one token meets."""
        return self.attention_matrix + self.experts_per_token * self.expert_matrix + self.router

    @property
    def parameters(self) -> int:
        """All parameters of the block."""
        return self.matrix + self.sharded_vector + self.replicated_vector


@lru_cache(maxsize=64)
def block_shape(model: ModelConfig) -> BlockShape:
    """Return the widths of one block; defaults as in `ModelConfig` when the recipe was not resolved."""
    hidden, heads = model.hidden, model.heads
    gpt = model.kind == "gpt"
    head_dim = model.head_dim or hidden // heads
    kv_heads = model.kv_heads or heads
    gated = (model.activation or ("gelu" if gpt else "swiglu")) == "swiglu"
    ffn = model.ffn_hidden or (4 * hidden if gpt else -(-8 * hidden // (3 * 256)) * 256)
    bias = gpt if model.bias is None else model.bias
    qkv_bias = bias if model.qkv_bias is None else model.qkv_bias
    qkv_width = (heads + 2 * kv_heads) * head_dim
    experts = (model.experts or 1) if model.kind == "moe" else 1
    norms_per_block = 2 * (2 if (model.norm or ("layernorm" if gpt else "rmsnorm")) == "layernorm" else 1)
    up = (2 if gated else 1) * ffn
    return BlockShape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden=ffn,
        gated=gated,
        experts=experts,
        experts_per_token=(model.experts_per_token or 1) if experts > 1 else 1,
        attention_matrix=hidden * qkv_width + heads * head_dim * hidden,
        expert_matrix=hidden * up + ffn * hidden,
        router=hidden * experts if experts > 1 else 0,
        sharded_vector=(qkv_width if qkv_bias else 0) + (up * experts if bias else 0),
        replicated_vector=norms_per_block * hidden
        + ((1 + experts) * hidden if bias else 0)
        + (2 * head_dim if model.qk_norm else 0),
    )


def embedding_parameters(model: ModelConfig) -> int:
    """Token embedding and, without rotary positions, learned positions."""
    return model.vocab * model.hidden + position_parameters(model)


def position_parameters(model: ModelConfig) -> int:
    """Learned position embedding; 0 with rotary positions."""
    return model.sequence * model.hidden if model.rope is None and model.kind == "gpt" else 0


def final_norm_parameters(model: ModelConfig) -> int:
    """Norm before the output head."""
    layernorm = (model.norm or ("layernorm" if model.kind == "gpt" else "rmsnorm")) == "layernorm"
    return model.hidden * (2 if layernorm else 1)


def is_tied(model: ModelConfig) -> bool:
    """Whether the output head shares the embedding."""
    return model.kind == "gpt" if model.tie_embeddings is None else model.tie_embeddings


def parameter_count(model: ModelConfig) -> int:
    """All parameters, a tied head counted once."""
    head = 0 if is_tied(model) else model.vocab * model.hidden
    blocks = model.layers * block_shape(model).parameters
    return blocks + embedding_parameters(model) + final_norm_parameters(model) + head


def flops_per_token(model: ModelConfig) -> float:
    """Model FLOPs of one token, forward and backward: 6 x matrix weights + 12 x layers x heads x head_dim x
    sequence.
    """
    shape = block_shape(model)
    attention = 4.0 * model.sequence * shape.heads * shape.head_dim
    forward = model.layers * (2.0 * shape.active_matrix + attention) + 2.0 * model.vocab * model.hidden
    return 3.0 * forward


def head_layers(model: ModelConfig, recompute: str) -> float:
    """Compute of the output head in units of a layer's, forward and backward: what a pipeline's split weighs
    it with.

    Attention counts the lower triangle only, which fused kernels compute. With `recompute` full, a layer is
    computed forward twice, the head never.
    """
    shape = block_shape(model)
    layer = 2.0 * shape.active_matrix + 2.0 * model.sequence * shape.heads * shape.head_dim
    passes = 4.0 if recompute == "full" else 3.0
    return 3.0 * 2.0 * model.vocab * model.hidden / (passes * layer)


def model_size(model: ModelConfig) -> ModelSize:
    """Return the figures of the model alone."""
    return ModelSize(parameters=parameter_count(model), flops_per_token=flops_per_token(model))
