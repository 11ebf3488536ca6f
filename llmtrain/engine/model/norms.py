"""LayerNorm and RMSNorm, computed in FP32 whatever the activations' format."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.config.model import ModelConfig
from llmtrain.engine.model.parameters import LogicalTensor, ModelParameter, ParameterSpec


class _RmsNorm(torch.autograd.Function):
    """[..., h] -> [..., h]; keeps the inputs and one number a row (torch's composite keeps FP32 copies)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        values = inputs.float()
        scale = (
            torch.linalg.vecdot(values, values).div_(values.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
        )
        ctx.save_for_backward(inputs, weight, scale)
        return (values * scale).mul_(weight).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, scale = ctx.saved_tensors
        normal = inputs.float() * scale
        gradient = gradients[0].float()
        to_weight = (gradient * normal).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * weight
        mean = torch.linalg.vecdot(gradient, normal).div_(normal.shape[-1]).unsqueeze(-1)
        to_inputs = normal.mul_(-mean).add_(gradient).mul_(scale)
        return to_inputs.to(inputs.dtype), to_weight, None


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, replicated over the tensor-parallel group."""

    bias: ModelParameter | None

    def __init__(self, model: ModelConfig, name: str, *, partial_over_tp: bool) -> None:
        super().__init__()
        self.epsilon = model.norm_epsilon
        self.is_layernorm = model.norm == "layernorm"
        self.weight = _vector(f"{name}.weight", model.hidden, 1.0, partial_over_tp)
        self.bias = _vector(f"{name}.bias", model.hidden, 0.0, partial_over_tp) if self.is_layernorm else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        if self.is_layernorm:
            return F.layer_norm(inputs, self.weight.shape, self.weight, self.bias, self.epsilon)
        return _RmsNorm.apply(inputs, self.weight, self.epsilon)


class HeadNorm(nn.Module):
    """RMSNorm of queries or keys over the width of a head. The tensor-parallel ranks see different heads."""

    def __init__(self, name: str, head_dim: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = _vector(name, head_dim, 1.0, partial_over_tp=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """[s, b, heads, d] -> the same."""
        return _RmsNorm.apply(inputs, self.weight, self.epsilon)


def _vector(name: str, width: int, fill: float, partial_over_tp: bool) -> ModelParameter:
    piece = LogicalTensor(name=name, shape=(width,), fill=fill)
    return ModelParameter(ParameterSpec(pieces=(piece,), decay=False, partial_over_tp=partial_over_tp))
