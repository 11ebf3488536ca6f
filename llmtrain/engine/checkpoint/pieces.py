"""A piece: what one rank holds of one global tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors dtype name of every dtype that a checkpoint may hold."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [flat_start, flat_start + data.numel()) of the row-major flattening of a box of a global
    tensor.

    The box (`box_start`, `box_shape`) is the tensor-parallel slice; the range is the ZeRO shard, cut
    anywhere. A rank may give several pieces of one key. Raises ValueError when the parts contradict each
    other.
    """

    key: str
    """Global name, e.g. `layers.3.attention.wq/exp_avg`; the same on every layout."""
    global_shape: tuple[int, ...]
    box_start: tuple[int, ...]
    box_shape: tuple[int, ...]
    flat_start: int
    data: Tensor
    """[numel], contiguous; read by a save, filled in place by a load; any device."""
    owner: bool = True
    """False: another rank writes the same elements (a replica)."""

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise ValueError(f"piece of {self.key!r}: {fault}")

    def _fault(self) -> str:
        if not len(self.global_shape) == len(self.box_start) == len(self.box_shape):
            return "global_shape, box_start and box_shape differ in length"
        for axis, size in enumerate(self.global_shape):
            low, length = self.box_start[axis], self.box_shape[axis]
            if low < 0 or length < 0 or low + length > size:
                return f"box {low}:{low + length} is outside 0:{size} on axis {axis}"
        if self.data.dim() != 1 or not self.data.is_contiguous():
            return f"data must be 1-D and contiguous, not of shape {tuple(self.data.shape)}"
        if self.flat_start < 0 or self.flat_start + self.data.numel() > prod(self.box_shape):
            end = self.flat_start + self.data.numel()
            return f"elements {self.flat_start}..{end} are outside a box of {prod(self.box_shape)} elements"
        if self.data.dtype not in DTYPE_NAMES:
            return f"dtype {self.data.dtype} cannot be stored"
        return ""


def whole(key: str, tensor: Tensor, *, owner: bool = True) -> Piece:
    """Return the piece that is a whole, unsharded tensor."""
    shape = tuple(tensor.shape)
    flat = tensor.detach().view(-1)
    return Piece(key, shape, (0,) * len(shape), shape, 0, flat, owner)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that save together: who this one is, and how they agree."""

    rank: int
    world_size: int
    exchange: Callable[[str], Sequence[str]]
    """Gather one short text from every rank, in rank order, on every rank: also the barrier of the commit."""
    begin: Callable[[int], None] = lambda _: None
    """Says which save, counted alike on all ranks, the next texts belong to."""


ALONE = Ranks(0, 1, lambda text: [text])
"""A world of one rank."""
