"""Formats that gradients travel in, and 8-bit quantisation with error feedback.

A replica encodes what it sends to each other one, and sums what it receives in FP32, in rank order: nothing
is rounded twice. 8-bit blocks of 128 elements share an FP32 scale, the largest magnitude / 127. What rounding
leaves out is added to the next step's gradient (error feedback: Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.plan.memory.bucket_packing import BLOCK, encoded_bytes

_SMALLEST_SCALE = 1e-30
"""Below it 1/scale would overflow; such gradients travel as zeros and stay in the error."""
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Codec:
    """FP32 <-> bytes, without state."""

    def __init__(self, name: str) -> None:
        """`name`: bf16, fp16 or int8."""
        self.name = name

    @property
    def has_errors(self) -> bool:
        """Whether what rounding leaves out is worth keeping."""
        return self.name == "int8"

    def encode(self, values: Tensor, errors: Tensor | None) -> Tensor:
        """[n, shard] FP32 -> [n, bytes]. With `errors` [n x shard], adds them to the values first, in
        place, and leaves there what was rounded away now."""
        if self.name != "int8":
            return values.to(_HALVES[self.name]).view(torch.uint8)
        members, shard = values.shape
        blocks = values.view(-1, BLOCK)
        if errors is not None:
            blocks.add_(errors.view(-1, BLOCK))
        scales = blocks.abs().amax(1, keepdim=True).div_(127.0).clamp_min_(_SMALLEST_SCALE)
        rounded = (blocks / scales).round_()
        encoded = torch.empty(members, encoded_bytes(shard, "int8"), dtype=torch.uint8, device=values.device)
        encoded[:, :shard].view(torch.int8).copy_(rounded.view(members, shard))
        encoded[:, shard:].view(torch.float32).copy_(scales.view(members, -1))
        if errors is not None:
            # Exact: a value and what it is sent as lie within a factor of two, or the latter is zero.
            kept = torch.sub(blocks, rounded.mul_(scales), out=errors.view(-1, BLOCK))
            # A gradient that is not finite is told to all by its scale; it must not poison later steps.
            kept.masked_fill_(~scales.isfinite(), 0.0)
        return encoded

    def decode_sum(self, encoded: Tensor, total: Tensor) -> None:
        """[n, bytes] -> the sum of the n rows in `total`, [shard] FP32."""
        if self.name != "int8":
            rows = encoded.view(_HALVES[self.name])
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)
            return
        shard = total.numel()
        blocks = total.view(-1, BLOCK).zero_()
        for row in encoded:
            numbers = row[:shard].view(torch.int8).view(-1, BLOCK)
            blocks.addcmul_(numbers.float(), row[shard:].view(torch.float32).unsqueeze(1))
