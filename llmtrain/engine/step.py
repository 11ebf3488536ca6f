"""One optimizer step, and one validation pass."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.config.layout import Layout
from llmtrain.corpus.samples import DIGEST_MASK
from llmtrain.engine.build import Parts
from llmtrain.engine.failures import NumericError
from llmtrain.engine.optimizer import clip_factor, learning_rate


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a rank would like to happen after this step; one rank's wish is enough."""

    stop: bool = False
    save: bool = False
    snapshot: bool = False
    """A snapshot in host memory."""


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
    data_seconds: float
    """That this rank waited for its batch."""
    data_digest: int
    """Of the samples that all ranks together read (`corpus/samples.py`); -1 when ranks of one replica read
    different ones."""


def train_step(parts: Parts, step: int, wishes: Wishes) -> StepResult:
    """Do one step, counted from 1: fetch, forward and backward, reduce, agree, clip, update.

    Raises NumericError on all ranks, before any weight changes, when the loss or the gradient norm is not
    finite.
    """
    started = time.perf_counter()
    waited, clock = _waited(parts), parts.passes.clock
    clock.begin()
    batch = parts.batches.fetch(step).map(parts.device.upload)
    data_seconds = time.perf_counter() - started
    parts.buckets.begin_step(parts.batches.micro_batches, parts.batches.busiest)
    clock.lap("fetch")
    scale = batch.loss_scale(parts.layout.micro_batch)
    loss = parts.passes.train(batch.tokens, batch.targets, scale, batch.positions)
    clock.lap("passes")
    parts.buckets.finish_reduction()
    clock.lap("reduce")
    agreed_loss, grad_norm, wishes, data_digest = agree(
        parts, loss, parts.buckets.squared_norm(), wishes, batch.digest
    )
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
        data_seconds=data_seconds,
        data_digest=data_digest,
    )


def agree(
    parts: Parts, loss: Tensor | None, squared_norm: Tensor, wishes: Wishes, digest: int = 0
) -> tuple[float, float, Wishes, int]:
    """The one collective over all ranks of a step: sum loss, squared norm and digests of what was read, and
    hear everybody's wishes."""
    numbers = torch.zeros(6, dtype=torch.float64, device=parts.device.torch_device)
    if loss is not None and parts.groups.tp.index == 0:
        numbers[0] = loss
    numbers[1] = squared_norm
    numbers[2], numbers[3], numbers[4] = float(wishes.stop), float(wishes.save), float(wishes.snapshot)
    numbers[5] = digest
    total_loss, total_norm, stop, save, snapshot, digests = parts.groups.world.all_reduce(numbers).tolist()
    norm = math.sqrt(total_norm) if total_norm >= 0.0 else math.nan
    found = Wishes(stop > 0.0, save > 0.0, snapshot > 0.0)
    return total_loss, norm, found, joint_digest(int(digests), parts.layout)


def joint_digest(total: int, layout: Layout) -> int:
    """Digest of a step from the sum of all ranks' digests: the ranks of one replica read the same samples."""
    digest, rest = divmod(total, layout.world_size // layout.dp)
    return digest & DIGEST_MASK if not rest else -1


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Mean losses over the predicted tokens of the validation sequences, alike on all ranks."""

    loss: float
    corpora: tuple[float | None, ...]
    """Of each corpus of the blend; None where it has no sequence."""


def validate(parts: Parts) -> ValidationLoss | None:
    """Losses of the validation sequences; None without validation."""
    held_out = parts.validation
    if held_out is None:
        return None
    for stage in parts.stages:
        stage.eval()
    batch = held_out.batch.map(parts.device.upload)
    losses = parts.passes.evaluate(batch.tokens, batch.targets, batch.positions)
    for stage in parts.stages:
        stage.train()
    totals = torch.zeros(held_out.corpora, dtype=torch.float64, device=parts.device.torch_device)
    if losses is not None and parts.groups.tp.index == 0:
        weighted = losses * held_out.weights.to(losses.device)
        for corpus in range(held_out.corpora):  # One sum each: scattered additions have no fixed order.
            totals[corpus] = weighted[(held_out.corpus_of == corpus).to(losses.device)].sum()
    sums = parts.groups.world.all_reduce(totals).tolist()
    shares = zip(sums, held_out.predicted, strict=True)
    return ValidationLoss(
        loss=sum(sums) / sum(held_out.predicted),
        corpora=tuple(total / tokens if tokens else None for total, tokens in shares),
    )


def _waited(parts: Parts) -> float:
    return sum(group.traffic.seconds for group in parts.groups.all())
