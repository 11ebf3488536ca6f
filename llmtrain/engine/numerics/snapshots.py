"""The training state in host memory, to go back to without a checkpoint: 12 bytes a weight, shared over the
replicas like the optimizer's state."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.engine.checkpoint.pieces import Piece
from llmtrain.engine.checkpoint.staging import HostCopy
from llmtrain.engine.parallel.buckets import Buckets


class Snapshot:
    """The newest good state. One copy, filled anew each time."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._copy: HostCopy | None = None
        self.step = 0
        """Step that it contains."""
        self.updates = 0
        """Updates that it contains."""

    def take(self, step: int, updates: int) -> None:
        """Copy the state after a step."""
        if self._copy is None:
            states = [
                live
                for bucket in self._buckets.buckets
                for live in (bucket.master, bucket.exp_avg, bucket.exp_avg_sq)
            ]
            self._copy = HostCopy([_whole(str(number), live) for number, live in enumerate(states)])
        if torch.cuda.is_initialized():  # the copy does not wait for the step's kernels by itself
            torch.cuda.synchronize()
        self._copy.take()
        self.step, self.updates = step, updates

    def put_back(self) -> None:
        """Give the masters and moments their old values; the caller publishes them."""
        if self._copy is not None:
            self._copy.put_back()


def _whole(name: str, tensor: Tensor) -> Piece:
    shape = (tensor.numel(),)
    return Piece(name, shape, (0,), shape, 0, tensor)
