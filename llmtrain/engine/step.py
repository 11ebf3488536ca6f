"""One optimizer step, and one validation pass."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.engine.build import Parts
from llmtrain.engine.failures import NumericError
from llmtrain.engine.optimizer import clip_factor, learning_rate


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a rank would like to happen after this step; one rank's wish is enough."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step, as all ranks agreed on it; the two times are this rank's own."""

    step: int
    loss: float
    """Mean over all tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    rate: float
    wishes: Wishes
    seconds: float
    compute_seconds: float
    """Without waiting for other ranks."""


def train_step(parts: Parts, step: int, wishes: Wishes) -> StepResult:
    """Do one step, counted from 1: fetch, forward and backward, reduce, agree, clip, update.

    Raises NumericError on all ranks, before any weight changes, when the loss or the gradient norm is not
    finite.
    """
    started = time.perf_counter()
    waited, clock = _waited(parts), parts.passes.clock
    clock.begin()
    tokens, targets = (parts.device.upload(part) for part in parts.batches.fetch(step))
    parts.buckets.begin_step(parts.batches.micro_batches, parts.batches.busiest)
    clock.lap("fetch")
    loss = parts.passes.train(tokens, targets, 1.0 / parts.micro_batches_in_all)
    clock.lap("passes")
    parts.buckets.finish_reduction()
    clock.lap("reduce")
    agreed_loss, grad_norm, wishes = agree(parts, loss, parts.buckets.squared_norm(), wishes)
    clock.lap("agree")
    if not (math.isfinite(agreed_loss) and math.isfinite(grad_norm)):
        raise NumericError(
            f"step {step}: loss {agreed_loss} and gradient norm {grad_norm} are not both finite",
            hint="lower learning_rate.peak or resume from an older checkpoint; the weights were not changed",
        )
    factor = clip_factor(grad_norm, parts.recipe.clip.norm)
    if factor < 1.0:
        parts.buckets.scale_gradients(factor)
    rate = learning_rate(parts.recipe.learning_rate, step, parts.steps)
    parts.optimizer.step(rate)
    clock.lap("update")
    parts.device.synchronize()
    seconds = time.perf_counter() - started
    pipeline_wait = clock.phase_seconds("passes") - clock.compute_seconds()
    return StepResult(
        step=step,
        loss=agreed_loss,
        grad_norm=grad_norm,
        rate=rate,
        wishes=wishes,
        seconds=seconds,
        compute_seconds=max(0.0, seconds - pipeline_wait - (_waited(parts) - waited)),
    )


def agree(
    parts: Parts, loss: Tensor | None, squared_norm: Tensor, wishes: Wishes
) -> tuple[float, float, Wishes]:
    """The one collective over all ranks of a step: sum loss and squared norm, and hear everybody's wishes."""
    numbers = torch.zeros(4, dtype=torch.float64, device=parts.device.torch_device)
    if loss is not None and parts.groups.tp.index == 0:
        numbers[0] = loss
    numbers[1] = squared_norm
    numbers[2], numbers[3] = float(wishes.stop), float(wishes.save)
    total_loss, total_norm, stop, save = parts.groups.world.all_reduce(numbers).tolist()
    norm = math.sqrt(total_norm) if total_norm >= 0.0 else math.nan
    return total_loss, norm, Wishes(stop > 0.0, save > 0.0)


def validate(parts: Parts) -> float | None:
    """Mean loss over the tokens of the validation sequences, the same number on all ranks; None without
    validation."""
    held_out = parts.validation
    if held_out is None:
        return None
    for stage in parts.stages:
        stage.eval()
    tokens, targets = parts.device.upload(held_out.tokens), parts.device.upload(held_out.targets)
    losses = parts.passes.evaluate(tokens, targets)
    for stage in parts.stages:
        stage.train()
    total = torch.zeros(1, dtype=torch.float64, device=parts.device.torch_device)
    if losses is not None and parts.groups.tp.index == 0:
        total += (losses * held_out.weights.to(losses.device)).sum()
    return float(parts.groups.world.all_reduce(total)) / held_out.tokens_in_all


def _waited(parts: Parts) -> float:
    return sum(group.traffic.seconds for group in parts.groups.all())
