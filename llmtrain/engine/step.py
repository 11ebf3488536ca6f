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
from llmtrain.engine.data import Batch
from llmtrain.engine.disturbance import disturbance
from llmtrain.engine.flight import flight
from llmtrain.engine.numerics.decide import Numbers, Ruling, Verdict
from llmtrain.engine.run_queue import run_queue
from llmtrain.engine.schedule import learning_rate


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
    is_applied: bool
    """Whether the weights changed."""
    wishes: Wishes
    seconds: float
    compute_seconds: float
    """Without waiting for other ranks."""
    data_seconds: float
    """That this rank waited for its batch."""
    core_wait_seconds: float
    """That this rank could have run and had no core."""
    data_digest: int
    """Of the samples that all ranks together read (`corpus/samples.py`); -1 when ranks of one replica read
    different ones."""


def train_step(parts: Parts, step: int, wishes: Wishes) -> StepResult:
    """Do one step, counted from 1: fetch, forward and backward, reduce, agree, clip, update.

    Numbers that are not good never reach the weights: the step is done again in FP32, left out, or taken
    back, as the recipe says. Raises NumericError on all ranks, before any weight changes, when nothing helps.
    """
    started, in_line = time.perf_counter(), run_queue.seconds()
    waited, clock, guard = _waited(parts), parts.passes.clock, parts.guard
    flight.begin_step(step)
    disturbance.begin_step(step)
    clock.begin()
    guard.begin_step(step)
    batch = parts.batches.fetch(step).map(parts.device.upload)
    data_seconds = time.perf_counter() - started
    clock.lap("fetch")
    first, numbers, ruling, scale = _judged_pass(parts, step, batch, wishes)
    measured = guard.measure(step, scale)
    rate = learning_rate(parts.recipe.learning_rate, step, parts.steps)
    parts.optimizer.before_change()
    if ruling.verdict is Verdict.APPLY:
        factor = guard.clip_factor(numbers, scale)
        if factor != 1.0:
            parts.buckets.scale_gradients(factor)
        parts.optimizer.step(rate)
    guard.settle(numbers, ruling, measured)
    clock.lap("update")
    parts.device.synchronize()
    seconds = time.perf_counter() - started
    pipeline_wait = clock.phase_seconds("passes") - clock.compute_seconds()
    return StepResult(
        step=step,
        loss=numbers.loss,
        grad_norm=numbers.grad_norm,
        rate=rate,
        is_applied=ruling.verdict is Verdict.APPLY,
        wishes=first.wishes,
        seconds=seconds,
        compute_seconds=max(0.0, seconds - pipeline_wait - (_waited(parts) - waited)),
        data_seconds=data_seconds,
        core_wait_seconds=run_queue.seconds() - in_line,
        data_digest=first.digest,
    )


def _judged_pass(
    parts: Parts, step: int, batch: Batch, wishes: Wishes
) -> tuple[Agreed, Numbers, Ruling, float]:
    """A pass, and another one in FP32 where the guard wants it: what ranks agreed on in the first one, then
    of the one that counts its numbers, the ruling, and the loss scale."""
    guard, scale = parts.guard, parts.guard.state.scale
    loss, first = _pass(parts, step, batch, scale, wishes)
    numbers = first.numbers(step, scale)
    ruling = guard.judge(numbers, loss)
    if ruling.verdict is Verdict.RECOMPUTE:
        scale = 1.0
        loss, agreed = _pass(parts, step, batch, scale, Wishes(), fp32=True)
        numbers = agreed.numbers(step, scale)
        ruling = guard.judge(numbers, loss, recomputed=True)
    return first, numbers, ruling, scale


def _pass(
    parts: Parts, step: int, batch: Batch, scale: float, wishes: Wishes, *, fp32: bool = False
) -> tuple[Tensor | None, Agreed]:
    """Forward and backward over a batch, and what all ranks make of it; this rank's own loss with it."""
    guard, clock = parts.guard, parts.passes.clock
    micro_batches = parts.layout.micro_batches(parts.recipe.batch.at(step))
    parts.buckets.begin_step(micro_batches[parts.groups.place.dp], max(micro_batches))
    guard.begin_pass(parts.layout)
    passes = parts.passes.in_format(torch.float32) if fp32 else parts.passes
    with guard.formats(fp32=fp32):
        weight = scale * batch.loss_scale(parts.layout.micro_batch)
        read = guard.spoil(batch)
        loss = passes.train(read.tokens, read.targets, weight, read.positions)
        clock.lap("passes")
        parts.buckets.finish_reduction()
    clock.lap("reduce")
    differ = not fp32 and guard.replicas_differ(step)
    agreed = agree(parts, loss, parts.buckets.squared_norm(), wishes, batch.digest, differ=differ)
    clock.lap("agree")
    return loss, agreed


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks agreed on after a pass."""

    loss: float
    """Times the loss scale, like the norm."""
    grad_norm: float
    wishes: Wishes
    digest: int
    corrupt: bool = False
    """Whether some replicas compute with different weights."""

    def numbers(self, step: int, scale: float) -> Numbers:
        """The step's numbers without the loss scale."""
        return Numbers(
            step=step, loss=self.loss / scale, grad_norm=self.grad_norm / scale, corrupt=self.corrupt
        )


def agree(
    parts: Parts,
    loss: Tensor | None,
    squared_norm: Tensor,
    wishes: Wishes,
    digest: int = 0,
    *,
    differ: bool = False,
) -> Agreed:
    """The one collective over all ranks of a step: sum loss, squared norm and digests of what was read, and
    hear everybody's wishes and suspicions."""
    numbers = torch.zeros(7, dtype=torch.float64, device=parts.device.torch_device)
    if loss is not None and parts.groups.tp.index == 0:
        numbers[0] = loss
    numbers[1] = squared_norm
    numbers[2], numbers[3], numbers[4] = float(wishes.stop), float(wishes.save), float(wishes.snapshot)
    numbers[5], numbers[6] = digest, float(differ)
    total_loss, total_norm, stop, save, snapshot, digests, corrupt = parts.groups.world.all_reduce(
        numbers
    ).tolist()
    return Agreed(
        loss=total_loss,
        grad_norm=math.sqrt(total_norm) if total_norm >= 0.0 else math.nan,
        wishes=Wishes(stop > 0.0, save > 0.0, snapshot > 0.0),
        digest=joint_digest(int(digests), parts.layout),
        corrupt=corrupt > 0.0,
    )


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
        loss=sum(sums) / max(1, sum(held_out.predicted)),
        corpora=tuple(total / tokens if tokens else None for total, tokens in shares),
    )


def _waited(parts: Parts) -> float:
    return sum(group.traffic.seconds for group in parts.groups.all())
