"""Host memory for a copy of the training state: training waits for the copy, not for the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.engine.checkpoint.pieces import Piece
from llmtrain.run.checkpoints.shard import ALIGNMENT

PINNED_BLOCK = 256 << 20
"""Bytes of a block of pinned memory, a power of two: torch rounds every block up to one, which would make
nearly twice the bytes of a large one."""


class HostCopy:
    """Reused host memory, pinned where the pieces are on an accelerator, that takes the pieces a rank owns.
    Their tensors must keep their places for as long as the copy is used."""

    def __init__(self, owned: Sequence[Piece], *, block: int | None = None) -> None:
        """Take the memory, and touch all of it, so that the first copy is as fast as later ones. `block`:
        bytes of a block, a multiple of ALIGNMENT; by default all is one where it is not pinned. Raises
        RuntimeError when there is not enough."""
        is_host = all(piece.data.device.type == "cpu" for piece in owned)
        room = block or (None if is_host else PINNED_BLOCK)
        placed = list(_lay_out(owned, room))
        self.bytes = placed[-1][2] if placed else 0
        """Host memory taken."""
        step = room or max(1, self.bytes)
        sizes = [min(step, self.bytes - first) for first in range(0, self.bytes, step)]
        blocks = [torch.zeros(size, dtype=torch.uint8, pin_memory=not is_host).fill_(1) for size in sizes]
        self._sources = [part.data.detach() for part, _, _ in placed]
        self._targets: list[Tensor] = [
            blocks[start // step][start % step :][: part.data.nbytes].view(part.data.dtype)
            for part, start, _ in placed
        ]
        self.pieces = tuple(
            replace(part, data=target) for (part, _, _), target in zip(placed, self._targets, strict=True)
        )
        """The pieces as they were when they were last taken, cut where a block ends."""

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

    def put_back(self) -> None:
        """Give the pieces' tensors the values that were taken last."""
        with torch.no_grad():
            for source, target in zip(self._sources, self._targets, strict=True):
                source.copy_(target)


def _lay_out(owned: Sequence[Piece], room: int | None) -> Iterator[tuple[Piece, int, int]]:
    """Every piece with its first byte among all blocks, and one past its last, rounded up: each begins
    aligned, and is cut where a block of `room` bytes ends."""
    end = 0
    for piece in owned:
        first, width = 0, piece.data.element_size()
        while first < piece.data.numel():
            count = piece.data.numel() - first
            if room is not None:
                count = min(count, (room - end % room) // width)
            data = piece.data[first : first + count]
            start, end = end, end + -(-data.nbytes // ALIGNMENT) * ALIGNMENT
            yield replace(piece, flat_start=piece.flat_start + first, data=data), start, end
            first += count
