"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019) on the FP32 shards."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmtrain.config.numerics import OptimizerConfig
from llmtrain.engine.parallel.buckets import Buckets


class ShardedAdamW:
    """torch's AdamW over the runs of every shard; its state lies in the buckets."""

    def __init__(self, config: OptimizerConfig, buckets: Buckets, *, fused: bool) -> None:
        self._buckets = buckets
        self.before_change: Callable[[], None] = lambda: None
        """Called before weights or moments change, by whoever changes them: a copy may be under way."""
        self._counts: list[torch.Tensor] = []
        members: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        states: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for bucket in buckets.buckets:
            for run in bucket.runs:
                part = slice(run.start, run.stop)
                weights = bucket.master[part]
                weights.grad = bucket.reduced[part]
                members[run.decay].append(weights)
                states.append((weights, bucket.exp_avg[part], bucket.exp_avg_sq[part]))
        groups = [
            {"params": weights, "weight_decay": config.weight_decay if decay else 0.0}
            for decay, weights in members.items()
            if weights
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=fused,
            foreach=None if fused else True,
        )
        for weights, exp_avg, exp_avg_sq in states:
            count = torch.zeros((), dtype=torch.float32, device=weights.device if fused else None)
            self._counts.append(count)
            self._adamw.state[weights] = {"step": count, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def set_step(self, step: int) -> None:
        """Say how many steps the loaded state has seen; AdamW's bias correction needs it."""
        for count in self._counts:
            count.fill_(step)

    def step(self, rate: float) -> None:
        """Change the masters by the reduced gradients at a learning rate, and begin to publish them to all
        replicas."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._buckets.start_publishing()
