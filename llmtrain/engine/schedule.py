"""The learning rate of every step. Pure, without torch."""

from __future__ import annotations

import math

from llmtrain.config.numerics import LearningRateConfig


def learning_rate(config: LearningRateConfig, step: int, steps: int) -> float:
    """Rate of a step, counted from 1: linear from zero to `peak` over the warm-up, then the schedule, which
    reaches `final` at the last step (cosine: Loshchilov and Hutter 2017; wsd: Hu et al. 2024, with the decays
    of Haegele et al. 2024)."""
    if step <= config.warmup_steps:
        return config.peak * step / config.warmup_steps
    final = config.peak / 10 if config.final is None else config.final
    if config.schedule == "constant":
        return config.peak
    if config.schedule == "cosine":
        return _between(final, config.peak, _cosine(step - config.warmup_steps, steps - config.warmup_steps))
    length = max(1, steps // 10) if config.decay_steps is None else config.decay_steps
    done = step - (steps - length)
    if done <= 0:
        return config.peak
    share = min(1.0, done / length)
    shapes = {"linear": 1.0 - share, "sqrt": 1.0 - math.sqrt(share), "cosine": _cosine(done, length)}
    return _between(final, config.peak, shapes[config.decay])


def _cosine(done: int, length: int) -> float:
    """From 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done / max(1, length))))


def _between(final: float, peak: float, share: float) -> float:
    return final + (peak - final) * share
