"""Rotary position embedding (Su et al. 2021), halves convention, with linear and Llama 3 frequency
scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llmtrain.config.model import RopeConfig


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, [head_dim / 2] in FP64, after scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended linearly in the number
    of turns."""
    turns = rope.original_sequence * frequencies / (2 * math.pi)
    span = rope.high_frequency_factor - rope.low_frequency_factor
    keep = ((turns - rope.low_frequency_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rope.factor)


def rotary_table(
    rope: RopeConfig, head_dim: int, sequence: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [sequence, 1, 1, head_dim / 2] in FP32."""
    positions = torch.arange(sequence, dtype=torch.float64)
    angles = torch.outer(positions, rotary_frequencies(rope, head_dim))[:, None, None, :]
    return angles.cos().float().to(device), angles.sin().float().to(device)


class _Rotate(torch.autograd.Function):
    """[s, b, heads, d] -> the same; the gradient is the rotation back, so nothing but the table is kept."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(values, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradients[0], cos, -sin), None, None


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = values.float().chunk(2, dim=-1)
    rotated = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    low, high = rotated.chunk(2, dim=-1)
    low.copy_((first * cos).addcmul_(second, sin, value=-1))
    high.copy_((second * cos).addcmul_(first, sin))
    return rotated


def rotate(values: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + d/2) of [s, b, heads, d] by its position's angle, in FP32."""
    return _Rotate.apply(values, *table)
