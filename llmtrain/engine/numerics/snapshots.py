"""The training state in host memory, to go back to without a checkpoint: 12 bytes a weight, shared over the
replicas like the optimizer's state."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.engine.parallel.buckets import Buckets


class Snapshot:
    """The newest good state. One buffer, filled anew each time."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.step = 0
        """Step that it contains."""
        self.updates = 0
        """Updates that it contains."""

    def take(self, step: int, updates: int) -> None:
        """Copy the state after a step."""
        if not self._copies:
            for bucket in self._buckets.buckets:
                for live in (bucket.master, bucket.exp_avg, bucket.exp_avg_sq):
                    self._copies.append((live, torch.empty_like(live, device="cpu", pin_memory=live.is_cuda)))
        for live, copy in self._copies:
            copy.copy_(live, non_blocking=True)
        if any(live.is_cuda for live, _ in self._copies):
            torch.cuda.synchronize()
        self.step, self.updates = step, updates

    def put_back(self) -> None:
        """Give the masters and moments their old values; the caller publishes them."""
        for live, copy in self._copies:
            live.copy_(copy)
