"""What shapes the optimisation besides AdamW: batches that grow, the z-loss, weight decay's exclusions, FP32
fall-backs of TF32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.batch_ramp import BatchRamp
from llmtrain.config.data import DataConfig
from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.config.numerics import StabilityConfig
from llmtrain.config.recipe import BatchConfig
from llmtrain.engine.model.parameters import parameters_of
from llmtrain.engine.parallel.collectives import TensorParallel, vocabulary_cross_entropy
from llmtrain.engine.parallel.groups import Group
from llmtrain.engine.step import Wishes, train_step, validate
from llmtrain.errors import ConfigError
from llmtrain.plan.layouts.supported import check_supported
from tests.support.engine_cases import Case, build, gpt, llama, recipe, run_case, run_cases
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

RAMPED = replace(
    recipe(llama(), steps=7), batch=BatchConfig(global_size=8, ramp=BatchRamp(start=4, increment=2, steps=4))
)
"""Batches of 4, 4, 6, 6, 8, 8, 8."""


def test_a_growing_batch_trains_alike_on_every_layout(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    alone = run_cases(0, 1, [Case(RAMPED, Layout(micro_batch=2))])[0]
    layouts = [Layout(dp=2, micro_batch=1), Layout(pp=2, micro_batch=2)]
    for outcome in run_ranks(run_cases, 2, tmp_path, [Case(RAMPED, layout) for layout in layouts])[0]:
        assert outcome.losses == pytest.approx(alone.losses, abs=2e-5)
    fixed = run_cases(0, 1, [Case(replace(RAMPED, batch=BatchConfig(global_size=8)), Layout(micro_batch=2))])[
        0
    ]
    assert fixed.losses[0] != alone.losses[0]


def test_a_growing_batch_reads_every_sample_once() -> None:
    parts = build(Case(RAMPED, Layout(micro_batch=2)), 0)
    read = [sample for step in range(1, 8) for sample in parts.batches.samples_of(step)]
    assert read == list(range(44))


def test_a_ramp_needs_whole_micro_batches_for_every_replica() -> None:
    check_supported(RAMPED, Layout(dp=2, micro_batch=2))
    with pytest.raises(ConfigError, match="at 4 sequences, 2 micro-batches are fewer than dp=4 replicas"):
        check_supported(RAMPED, Layout(dp=4, micro_batch=2))


@pytest.mark.parametrize("weight", [0.0, 1e-2])
def test_the_z_loss_and_its_gradient(weight: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(20, 30, generator=generator)).requires_grad_()
    targets = torch.randint(30, (20,), generator=generator)
    tp = TensorParallel(Group("tp", (0,), 0, None), False)
    losses = vocabulary_cross_entropy(logits, targets, 0, tp, weight)
    (ours,) = torch.autograd.grad(losses.mean(), logits)
    expected = F.cross_entropy(logits, targets, reduction="none") + weight * logits.logsumexp(-1) ** 2
    (theirs,) = torch.autograd.grad(expected.mean(), logits)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(ours, theirs)


def test_the_z_loss_holds_the_denominator_down_and_stays_out_of_validation() -> None:
    plain = build(Case(recipe(llama()), Layout(micro_batch=2)), 0)
    weighed = replace(recipe(llama()), stability=StabilityConfig(z_loss=1e-2))
    with_z = build(Case(weighed, Layout(micro_batch=2)), 0)
    assert validate(with_z) == validate(plain)
    first, other = (train_step(parts, 1, Wishes()).loss for parts in (plain, with_z))
    assert other - first == pytest.approx(1e-2 * 4.57**2, rel=0.05)  # log(96) squared


@pytest.mark.parametrize("model", [llama(qkv_bias=True), gpt()], ids=["llama", "gpt"])
def test_norms_and_biases_do_not_decay(model: ModelConfig) -> None:
    parts = build(Case(recipe(model), Layout(micro_batch=2)), 0)
    for parameter in parameters_of(parts.stages):
        is_matrix = len(parameter.spec.shape) > 1
        assert parameter.spec.decay == is_matrix, parameter.spec.pieces[0].name
    decayed = 0
    for bucket in parts.buckets.buckets:
        before = bucket.master.clone()
        bucket.reduced.zero_()
        parts.optimizer.step(1.0)
        for run in bucket.runs:
            part = slice(run.start, run.stop)
            shrunk = before[part] * 0.9 if run.decay else before[part]
            torch.testing.assert_close(bucket.master[part], shrunk)
            decayed += run.decay
        break
    assert decayed


def test_tf32_computes_as_fp32_on_a_cpu() -> None:
    case = Case(recipe(llama(), steps=3), Layout(micro_batch=2))
    other = replace(case, recipe=replace(case.recipe, precision=replace(case.recipe.precision, mode="tf32")))
    assert run_cases(0, 1, [case])[0].losses == run_cases(0, 1, [other])[0].losses


def test_every_mode_ends_where_fp32_does() -> None:
    """A short version of `tests/bench/precision_modes.py`, which does it on the default corpus."""
    torch.set_num_threads(1)
    losses = {}
    for mode in ("fp32", "bf16", "fp16"):
        made = replace(recipe(llama(), mode=mode, steps=30), data=DataConfig(validation_every=0))
        losses[mode] = run_case(0, Case(made, Layout(micro_batch=4))).losses
    assert losses["fp32"][-1] < losses["fp32"][0] - 1.0
    for mode in ("bf16", "fp16"):
        assert losses[mode][-1] == pytest.approx(losses["fp32"][-1], rel=0.01)
