"""Host memory for a copy of the training state: training waits for the copy, not for the disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.engine.checkpoint.pieces import Piece
from llmtrain.run.checkpoints.shard import ALIGNMENT


class HostCopy:
    """One reused block of host memory, pinned where the pieces are on an accelerator, that takes the pieces a
    rank owns. Their tensors must keep their places for as long as the copy is used."""

    def __init__(self, owned: Sequence[Piece]) -> None:
        """Take the memory, and touch all of it, so that the first copy is as fast as later ones. Raises
        RuntimeError when there is not enough."""
        sizes = [piece.data.numel() * piece.data.element_size() for piece in owned]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        is_host = all(piece.data.device.type == "cpu" for piece in owned)
        self._block = torch.zeros(end, dtype=torch.uint8, pin_memory=not is_host)
        self._block.fill_(1)
        self._sources = [piece.data.detach() for piece in owned]
        self._targets: list[Tensor] = [
            self._block[start : start + size].view(piece.data.dtype)
            for piece, start, size in zip(owned, starts, sizes, strict=True)
        ]
        self.pieces = tuple(
            replace(piece, data=target) for piece, target in zip(owned, self._targets, strict=True)
        )
        """The pieces as they were when they were last taken."""

    @property
    def bytes(self) -> int:
        """Host memory taken."""
        return self._block.numel()

    def take(self) -> None:
        """Copy all pieces as they are now; done on return. The device must have finished changing them."""
        devices = {source.device for source in self._sources if source.is_cuda}
        streams = [torch.cuda.Stream(device) for device in devices]
        with torch.no_grad(), ExitStack() as beside:
            for stream in streams:  # the copy must not queue up between the kernels of a step
                beside.enter_context(torch.cuda.stream(stream))
            for source, target in zip(self._sources, self._targets, strict=True):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
