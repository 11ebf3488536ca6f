"""Selective recomputation: what a cheap operation can make again is not kept for the backward pass.

Kept are the results of the linear layers and of attention, and the residual stream. Norms, rotary positions,
the activation function and changes of the memory's order are run again in the backward pass; linear layers,
attention (whose fused kernels keep one number a row beside their result) and collectives never are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to make a tensor again, and in which view of it an operation kept it."""

    make: Callable[[], Tensor]
    shape: torch.Size
    stride: tuple[int, ...]


class made_again(saved_tensors_hooks):
    """Inside, what operations keep of some contiguous tensors is made again for their backward pass."""

    def __init__(self, *recipes: tuple[Tensor, Callable[[], Tensor]]) -> None:
        """Each tensor with a function that makes it again."""
        known = {_place(value): make for value, make in recipes if value.is_contiguous()}

        def pack(tensor: Tensor) -> Any:
            # Operations keep views of what they are given, too.
            make = known.get(_place(tensor))
            return tensor if make is None else _Recipe(make, tensor.shape, tensor.stride())

        super().__init__(pack, _unpack)


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """What a tensor and its views of the same elements have in common; also without memory (meta device)."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


@torch.no_grad()
def _unpack(kept: Any) -> Tensor:
    made: Tensor = kept.make().as_strided(kept.shape, kept.stride) if isinstance(kept, _Recipe) else kept
    return made


def activation(wide: Tensor, *, gated: bool) -> Tensor:
    """SwiGLU of gate and up side by side, [..., 2 f] -> [..., f], or GELU in its tanh form."""
    if not gated:
        return F.gelu(wide, approximate="tanh")
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGlu(torch.autograd.Function):
    """[..., 2 f] -> [..., f]; keeps its input only."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        return activation(wide, gated=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (wide,) = gradients, ctx.saved_tensors
        gate, up = wide.chunk(2, dim=-1)
        to_wide = torch.empty_like(wide)
        to_gate, to_up = to_wide.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(gate), out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))
        return to_wide


def lean_activation(wide: Tensor, *, gated: bool) -> Tensor:
    """`activation` that keeps nothing but its input for the backward pass."""
    return _SwiGlu.apply(wide) if gated else activation(wide, gated=False)
