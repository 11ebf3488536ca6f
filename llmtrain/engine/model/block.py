"""One transformer block: attention and feed-forward, each after its norm and added to the residual stream.

Shapes: s sequence, b micro-batch, h hidden, d head width, q and k query and key/value heads on this rank.
Activations are [s, b, h], or [s/n, b, h] between the linear layers under sequence parallelism.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.config.model import ModelConfig
from llmtrain.engine.model.layers import ColumnLinear, RowLinear
from llmtrain.engine.model.norms import HeadNorm, Norm
from llmtrain.engine.model.rope import rotate
from llmtrain.engine.parallel.collectives import TensorParallel

RotaryTable = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, model: ModelConfig, name: str, tp: TensorParallel, *, recompute: bool) -> None:
        super().__init__()
        kv_heads, self.head_dim = int(model.kv_heads or 0), int(model.head_dim or 0)
        self.heads, self.kv_heads = model.heads // tp.size, kv_heads // tp.size
        self.recompute = recompute
        rows = {
            f"{name}.wq": model.heads * self.head_dim,
            f"{name}.wk": kv_heads * self.head_dim,
            f"{name}.wv": kv_heads * self.head_dim,
        }
        biases = {f"{name}.w{part}": f"{name}.b{part}" for part in "qkv"} if model.qkv_bias else None
        self.qkv = ColumnLinear(rows, model.hidden, tp, std=model.init_std, bias_names=biases)
        self.out = RowLinear(
            f"{name}.wo",
            model.hidden,
            model.heads * self.head_dim,
            tp,
            std=residual_std(model),
            bias_name=f"{name}.bo" if model.bias else None,
        )
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if model.qk_norm:
            self.q_norm = HeadNorm(f"{name}.q_norm", self.head_dim, model.norm_epsilon)
            self.k_norm = HeadNorm(f"{name}.k_norm", self.head_dim, model.norm_epsilon)

    def forward(self, inputs: Tensor, table: RotaryTable | None, mask: Tensor | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]. `mask` [b, 1, s, s] says which keys each query sees; None: all up to
        itself."""
        packed = self.qkv(inputs)
        heads = packed.view(*packed.shape[:2], self.heads + 2 * self.kv_heads, self.head_dim)
        if self.recompute:
            mixed = checkpoint(self._core, heads, table, mask, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(heads, table, mask)
        return self.out(mixed)

    def _core(self, heads: Tensor, table: RotaryTable | None, mask: Tensor | None) -> Tensor:
        """[s, b, q + 2k, d] -> [s, b, q d]."""
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if table is not None:
            query, key = rotate(query, table), rotate(key, table)
        mixed = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class FeedForward(nn.Module):
    """GELU (tanh form) or SwiGLU between two linear layers; gate and up are one GEMM."""

    def __init__(self, model: ModelConfig, name: str, tp: TensorParallel) -> None:
        super().__init__()
        self.gated = model.activation == "swiglu"
        width = int(model.ffn_hidden or 0)
        parts = ("gate", "up") if self.gated else ("up",)
        self.into = ColumnLinear(
            {f"{name}.{part}": width for part in parts},
            model.hidden,
            tp,
            std=model.init_std,
            bias_names={f"{name}.{part}": f"{name}.{part}_bias" for part in parts} if model.bias else None,
        )
        self.down = RowLinear(
            f"{name}.down",
            model.hidden,
            width,
            tp,
            std=residual_std(model),
            bias_name=f"{name}.down_bias" if model.bias else None,
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        wide = self.into(inputs)
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(wide, approximate="tanh"))


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self, model: ModelConfig, layer: int, tp: TensorParallel, recompute: str) -> None:
        """`recompute` is the layout's: none, selective (attention core) or full (the whole block)."""
        super().__init__()
        name = f"layers.{layer}"
        partial = tp.sequence_parallel
        self.recompute = recompute == "full"
        self.dtype: torch.dtype | None = None
        """Format that it computes in, when that is not the activations'; its weights must be of it."""
        self.attention_norm = Norm(model, f"{name}.attention_norm", partial_over_tp=partial)
        self.attention = Attention(model, f"{name}.attention", tp, recompute=recompute == "selective")
        self.ffn_norm = Norm(model, f"{name}.ffn_norm", partial_over_tp=partial)
        self.ffn = FeedForward(model, f"{name}.ffn", tp)

    def forward(self, inputs: Tensor, table: RotaryTable | None, mask: Tensor | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]; `mask` as `Attention`'s."""
        hidden = inputs if self.dtype is None else inputs.to(self.dtype)
        if self.recompute and self.training:
            hidden = checkpoint(
                self._layer, hidden, table, mask, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden = self._layer(hidden, table, mask)
        return hidden if self.dtype is None else hidden.to(inputs.dtype)

    def _layer(self, inputs: Tensor, table: RotaryTable | None, mask: Tensor | None) -> Tensor:
        inputs = inputs + self.attention(self.attention_norm(inputs), table, mask)
        return inputs + self.ffn(self.ffn_norm(inputs))


def residual_std(model: ModelConfig) -> float:
    """Initial deviation of the two projections that write to the residual stream, 1/sqrt(2 layers) of the
    others', so that the stream's variance does not grow with depth (Radford et al. 2019)."""
    return model.init_std / math.sqrt(2 * model.layers)
