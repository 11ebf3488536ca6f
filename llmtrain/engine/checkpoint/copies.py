"""Files between nodes over the ranks' process group: copies of snapshots, and shards that a node lacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

File = TypeVar("File")

CHUNK = 8 << 20
"""Bytes of one message."""


@dataclass(slots=True)
class Outgoing:
    """A file on its way to a rank."""

    path: Path
    to: int
    position: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.path.stat().st_size

    def next_chunk(self) -> Tensor:
        """The next bytes; read from shared memory, or whatever holds the file."""
        count = min(CHUNK, self.size - self.position)
        with self.path.open("rb", buffering=0) as stream:
            chunk = np.fromfile(stream, np.uint8, count, offset=self.position)
        if len(chunk) != count:
            raise RuntimeError(f"{self.path} ends too early")
        self.position += count
        return torch.from_numpy(chunk)


@dataclass(slots=True)
class Incoming:
    """A file on its way from a rank, of a size that is known."""

    path: Path
    source: int
    size: int
    position: int = 0

    def take(self, chunk: Tensor) -> None:
        """Append bytes."""
        with self.path.open("wb" if not self.position else "r+b", buffering=0) as stream:
            stream.seek(self.position)
            view = chunk.numpy().data
            while view:
                view = view[os.write(stream.fileno(), view) :]
        self.position += chunk.numel()


def exchange_files(
    outgoing: Sequence[Outgoing],
    incoming: Sequence[Incoming],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Send and receive files at the same time; every file must be in one rank's `outgoing` and in another's
    `incoming`, in the same order for each pair. Raises OSError, RuntimeError when a peer is gone.

    `device` is where the group's tensors lie.
    """
    going, coming = list(outgoing), list(incoming)
    for empty in (one for one in coming if not one.size):
        empty.path.touch()
    while True:
        going = [one for one in going if one.position < one.size]
        coming = [one for one in coming if one.position < one.size]
        if not going and not coming:
            return
        sends = _first_of_each([(one.to, one) for one in going])
        receives = _first_of_each([(one.source, one) for one in coming])
        messages = [dist.P2POp(dist.isend, one.next_chunk().to(device), one.to, group) for one in sends]
        buffers = []
        for one in receives:
            buffer = torch.empty(min(CHUNK, one.size - one.position), dtype=torch.uint8, device=device)
            messages.append(dist.P2POp(dist.irecv, buffer, one.source, group))
            buffers.append((one, buffer))
        # Together: NCCL would do them one after the other, and two ranks would wait with their sends.
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for one, buffer in buffers:
            one.take(buffer.cpu())


def _first_of_each(pairs: Sequence[tuple[int, File]]) -> list[File]:
    """The first file of every peer: between two ranks, messages arrive in the order they are sent."""
    return list(dict(reversed(pairs)).values())
