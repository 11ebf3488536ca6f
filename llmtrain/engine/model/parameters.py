"""Logical tensors and the physical parameters made of them.

A logical tensor is what a checkpoint names and what a seed initialises: whole, free of any layout. A
physical parameter is one rank's storage: the row-wise concatenation of the boxes of one or more logical
tensors, so that a fused GEMM (query, key and value; gate and up) is one matrix, yet each of its parts can
be saved, loaded and cut anew on its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """One tensor of the model and this rank's box of it."""

    name: str
    """E.g. `layers.3.attention.wq`."""
    shape: tuple[int, ...]
    """Global shape."""
    split: int | None = None
    """Dimension that tensor parallelism cuts; None: every rank of the group holds all of it."""
    start: int = 0
    """First index of the box along `split`."""
    length: int = 0
    """Extent of the box along `split`."""
    std: float | None = None
    """Standard deviation of the initial normal values; None: the constant `fill`."""
    fill: float = 0.0
    """Initial constant."""

    @property
    def box_start(self) -> tuple[int, ...]:
        """First index of the box on every dimension."""
        return tuple(self.start if dim == self.split else 0 for dim in range(len(self.shape)))

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(self.length if dim == self.split else size for dim, size in enumerate(self.shape))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.box_shape)

    def initial(self, seed: int) -> Tensor:
        """Initial values of the box, FP32: drawn for the whole tensor from (seed, name), then cut, so that
        every layout starts from the same weights."""
        if self.std is None:
            return torch.full(self.box_shape, self.fill)
        generator = torch.Generator().manual_seed(_tensor_seed(seed, self.name))
        whole = torch.empty(self.shape).normal_(0.0, self.std, generator=generator)
        return whole if self.split is None else whole.narrow(self.split, self.start, self.length).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What a physical parameter is made of, and how it is trained."""

    pieces: tuple[LogicalTensor, ...]
    decay: bool
    """Whether weight decay applies: matrices and embeddings, not norms and biases."""
    partial_over_tp: bool = False
    """Whether each tensor-parallel rank sees a part of the gradient only, so that it must be summed over
    the group."""
    shared_over_pp: bool = False
    """Whether the first and the last pipeline stage hold the same tensor (a tied embedding)."""

    @property
    def replicated_over_tp(self) -> bool:
        """Whether every rank of the tensor-parallel group holds the same values."""
        return self.pieces[0].split is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the physical parameter: the pieces' boxes on top of each other."""
        return (sum(piece.box_shape[0] for piece in self.pieces), *self.pieces[0].box_shape[1:])

    @property
    def numel(self) -> int:
        """Elements of the physical parameter."""
        return prod(self.shape)


class ModelParameter(nn.Parameter):
    """A physical parameter that knows its spec. Memory and initial values come later
    (`parallel/buckets.py`)."""

    spec: ParameterSpec

    def __new__(cls, spec: ParameterSpec) -> ModelParameter:
        """Make it without storage; `parallel/buckets.py` gives it a view of a flat buffer."""
        parameter = super().__new__(cls, torch.empty(0))
        parameter.spec = spec
        return parameter


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def parameters_of(modules: Sequence[nn.Module]) -> list[ModelParameter]:
    """All parameters of the modules in order, each once; raises TypeError for a parameter without a spec."""
    found: dict[int, ModelParameter] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, ModelParameter):
                raise TypeError(f"{name} is a plain parameter: nobody could save it")
            found[id(parameter)] = parameter
    return list(found.values())
