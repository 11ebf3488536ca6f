"""One transformer block: attention and feed-forward, each after its norm and added to the residual stream.

Shapes: s sequence, b micro-batch, h hidden, d head width, q and k query and key/value heads on this rank.
Activations are [s, b, h], or [s/n, b, h] between the linear layers under sequence parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.config.model import ModelConfig
from llmtrain.engine.device import fuses_grouped_heads
from llmtrain.engine.model.layers import ColumnLinear, RowLinear
from llmtrain.engine.model.norms import HeadNorm, Norm
from llmtrain.engine.model.recompute import activation, lean_activation, made_again
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
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        turned = self._turn(query, self.q_norm, table), self._turn(key, self.k_norm, table)
        if not self.recompute:
            return self.out(_in_order(_attend(*turned, value, mask)))
        kept = query.detach(), key.detach()
        with made_again(
            (turned[0], lambda: self._turn(kept[0], self.q_norm, table)),
            (turned[1], lambda: self._turn(kept[1], self.k_norm, table)),
        ):
            mixed = _attend(*turned, value, mask)
        ordered, result = _in_order(mixed), mixed.detach()
        with made_again((ordered, lambda: _in_order(result))):
            return self.out(ordered)

    def _turn(self, heads: Tensor, norm: HeadNorm | None, table: RotaryTable | None) -> Tensor:
        """Normed and rotated queries or keys, [s, b, heads, d]."""
        normed = heads if norm is None else norm(heads)
        return normed if table is None else rotate(normed, table)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Fused causal attention of [s, b, heads, d] -> [b, q, s, d]."""
    groups = query.shape[2] // key.shape[2]
    if groups > 1 and not fuses_grouped_heads(query, mask):
        key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
    return F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )


def _in_order(mixed: Tensor) -> Tensor:
    """[b, q, s, d] -> [s, b, q d]."""
    return mixed.permute(2, 0, 1, 3).flatten(2)


class FeedForward(nn.Module):
    """GELU (tanh form) or SwiGLU between two linear layers; gate and up are one GEMM."""

    def __init__(self, model: ModelConfig, name: str, tp: TensorParallel, *, recompute: bool) -> None:
        super().__init__()
        self.gated, self.recompute = model.activation == "swiglu", recompute
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
        if not self.recompute:
            return self.down(activation(wide, gated=self.gated))
        inner, kept = lean_activation(wide, gated=self.gated), wide.detach()
        with made_again((inner, lambda: activation(kept, gated=self.gated))):
            return self.down(inner)


class Block(nn.Module):
    """One layer of the model."""

    def __init__(self, model: ModelConfig, layer: int, tp: TensorParallel, recompute: str) -> None:
        """`recompute` is the layout's: none, selective (all but the linear layers) or full (the whole
        block)."""
        super().__init__()
        name = f"layers.{layer}"
        parts = tp.sequence_parallel
        self.recompute, selective = recompute == "full", recompute == "selective"
        self.selective = selective
        self.dtype: torch.dtype | None = None
        """Format that it computes in, when that is not the activations'; its weights must be of it."""
        self.attention_norm = Norm(model, f"{name}.attention_norm", partial_over_tp=parts)
        self.attention = Attention(model, f"{name}.attention", tp, recompute=selective)
        self.ffn_norm = Norm(model, f"{name}.ffn_norm", partial_over_tp=parts)
        self.ffn = FeedForward(model, f"{name}.ffn", tp, recompute=selective)

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
        attention = partial(self.attention, table=table, mask=mask)
        inputs = inputs + self._after_norm(self.attention_norm, attention, inputs)
        return inputs + self._after_norm(self.ffn_norm, self.ffn, inputs)

    def _after_norm(self, norm: Norm, work: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        if not self.selective:
            return work(norm(inputs))
        normed, kept = norm(inputs), inputs.detach()
        with made_again((normed, lambda: norm(kept))):
            return work(normed)


def residual_std(model: ModelConfig) -> float:
    """Initial deviation of the two projections that write to the residual stream, 1/sqrt(2 layers) of the
    others', so that the stream's variance does not grow with depth (Radford et al. 2019)."""
    return model.init_std / math.sqrt(2 * model.layers)
