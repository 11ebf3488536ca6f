"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019) on the FP32 shards, clipping, and the
learning rate."""

from __future__ import annotations

import math

import torch

from llmtrain.config.numerics import LearningRateConfig, OptimizerConfig
from llmtrain.engine.parallel.buckets import Buckets


def learning_rate(config: LearningRateConfig, step: int, steps: int) -> float:
    """Rate of a step, counted from 1: linear from zero to `peak` over the warm-up, then a cosine that
    reaches `final` at the last step, or constant."""
    if step <= config.warmup_steps:
        return config.peak * step / config.warmup_steps
    if config.schedule == "constant":
        return config.peak
    final = config.peak / 10 if config.final is None else config.final
    span = max(1, steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return final + (config.peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


class ShardedAdamW:
    """torch's AdamW over the runs of every shard; its state lies in the buckets."""

    def __init__(self, config: OptimizerConfig, buckets: Buckets, *, fused: bool) -> None:
        self._buckets = buckets
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
        """Change the masters by the reduced gradients at a learning rate, then publish them to all
        replicas."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._buckets.publish()


def clip_factor(norm: float, limit: float) -> float:
    """Factor that brings gradients of a global norm down to the limit; 1 when they are within it, or the
    limit is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
