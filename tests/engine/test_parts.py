"""The pieces of the engine, each against a formula or against torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.layout import Layout
from llmtrain.config.model import RopeConfig
from llmtrain.config.numerics import LearningRateConfig, StabilityConfig
from llmtrain.config.recipe import BatchConfig
from llmtrain.corpus.samples import Samples
from llmtrain.corpus.sampling import SampleOrder
from llmtrain.engine.data import TrainingBatches, ValidationBatches
from llmtrain.engine.failures import NumericError, RestoreError, describe, error_class
from llmtrain.engine.model import block
from llmtrain.engine.model.norms import Norm
from llmtrain.engine.model.rope import rotary_frequencies, rotary_table, rotate
from llmtrain.engine.model.stage import vocabulary_rows
from llmtrain.engine.numerics.windows import clip_factor
from llmtrain.engine.parallel.collectives import TensorParallel, vocabulary_cross_entropy
from llmtrain.engine.parallel.groups import Group
from llmtrain.engine.parallel.pipeline import stage_places
from llmtrain.engine.rank_env import read_rank_env
from llmtrain.engine.schedule import learning_rate
from llmtrain.engine.state import state_pieces
from llmtrain.engine.step import Wishes, train_step
from llmtrain.errors import CheckpointError, ConfigError, CorpusError, UsageError
from llmtrain.plan.layouts.supported import check_supported
from tests.support.engine_cases import Case, ZipfWindows, build, gpt, llama, recipe

pytestmark = pytest.mark.engine


def alone() -> TensorParallel:
    return TensorParallel(Group("tp", (0,), 0, None), False)


def part_of(size: int, index: int) -> TensorParallel:
    return TensorParallel(Group("tp", tuple(range(size)), index, None), False)


# ---- model -----------------------------------------------------------------------------------------------
def test_rms_norm_is_torchs() -> None:
    norm = Norm(llama(), "n", partial_over_tp=False)
    weight = torch.randn(48)
    norm.weight.data = weight.clone()
    mine, other = torch.randn(5, 3, 48, requires_grad=True), torch.zeros(())
    other = mine.detach().clone().requires_grad_()
    reference = weight.clone().requires_grad_()
    gradient = torch.randn(5, 3, 48)
    norm(mine).backward(gradient)
    F.rms_norm(other, (48,), reference, 1e-5).backward(gradient)
    torch.testing.assert_close(mine.grad, other.grad)
    torch.testing.assert_close(norm.weight.grad, reference.grad)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = RopeConfig(
        theta=500_000.0,
        scaling="llama3",
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_sequence=8192,
    )
    plain = rotary_frequencies(RopeConfig(theta=500_000.0), 128)
    scaled = rotary_frequencies(rope, 128)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wave = 2 * math.pi / before
        if wave < 8192 / 4:
            assert after == before
        elif wave > 8192:
            assert after == pytest.approx(before / 8)
        else:
            share = (8192 / wave - 1) / 3
            assert after == pytest.approx((1 - share) * before / 8 + share * before)
    assert rotary_frequencies(RopeConfig(scaling="linear", factor=4.0), 8).tolist() == pytest.approx(
        [value / 4 for value in rotary_frequencies(RopeConfig(), 8).tolist()]
    )


def test_rotation_keeps_lengths_and_turns_back() -> None:
    table = rotary_table(RopeConfig(), 8, 6, torch.device("cpu"))
    values = torch.randn(6, 2, 3, 8, requires_grad=True)
    turned = rotate(values, table)
    torch.testing.assert_close(turned.norm(dim=-1), values.norm(dim=-1))
    torch.testing.assert_close(turned[0], values[0])
    turned.backward(turned.detach())  # the gradient is the rotation back
    torch.testing.assert_close(values.grad, values.detach())


def test_cross_entropy_is_torchs() -> None:
    logits = torch.randn(20, 31, requires_grad=True)
    other = logits.detach().clone().requires_grad_()
    targets = torch.randint(0, 31, (20,))
    weights = torch.rand(20)
    (vocabulary_cross_entropy(logits, targets, 0, alone()) * weights).sum().backward()
    (F.cross_entropy(other, targets, reduction="none") * weights).sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)


@pytest.mark.parametrize(("vocab", "size"), [(96, 2), (101, 2), (257, 4), (50257, 8), (33, 4), (128256, 8)])
def test_vocabulary_rows_cover_all_once(vocab: int, size: int) -> None:
    parts = [vocabulary_rows(vocab, part_of(size, index)) for index in range(size)]
    assert all(rows > 0 for _, rows in parts)
    assert [first for first, _ in parts] == [sum(rows for _, rows in parts[:index]) for index in range(size)]
    assert sum(rows for _, rows in parts) == vocab


def test_keys_of_a_group_may_be_repeated_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = (torch.randn(8, 2, heads, 4, requires_grad=True) for heads in (6, 2)), []
    query, key = made
    for fuses in (True, False):
        monkeypatch.setattr(block, "fuses_grouped_heads", lambda *_, fuses=fuses: fuses)
        mixed = block._attend(query, key, key, None)
        found.append((mixed, *torch.autograd.grad(mixed.square().sum(), (query, key))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_stages_cover_all_layers_in_order() -> None:
    layout = Layout(pp=3, vpp=2)
    places = sorted(
        (place for rank in range(3) for place in stage_places(llama(layers=10), layout, rank)),
        key=lambda place: place.index,
    )
    covered = [place.first_layer + offset for place in places for offset in range(place.layers)]
    assert covered == list(range(10))
    assert [place.index for place in stage_places(llama(layers=10), layout, 1)] == [1, 4]
    assert [place.is_last for place in places] == [False] * 5 + [True]


@pytest.mark.parametrize("model", [llama(qk_norm=True), gpt()], ids=["llama", "gpt"])
def test_pieces_hold_the_whole_model_once(model: Any) -> None:
    parts = build(Case(recipe(model)), 0)
    pieces = list(state_pieces(parts.buckets, parts.groups))
    sizes = Counter({piece.key: piece.data.numel() for piece in pieces})
    for piece in pieces:
        assert piece.owner
        assert piece.data.numel() == math.prod(piece.global_shape) == sizes[piece.key]
    names = {piece.key.rpartition("/")[0] for piece in pieces}
    assert {"embedding.weight", "layers.3.attention.wq", "layers.0.ffn.up", "final_norm.weight"} <= names
    assert ("head.weight" in names) is (not model.tie_embeddings)
    assert len(pieces) == 3 * len(names)


# ---- data ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [Layout(micro_batch=2), Layout(dp=3, micro_batch=1), Layout(dp=2, tp=2)])
def test_replicas_share_each_global_batch(layout: Layout) -> None:
    source = ZipfWindows()
    order = SampleOrder(source.windows(32), 7)
    for step in (1, 5, 200):
        rows = [
            TrainingBatches(
                Samples([source], sequence=32, seed=7), BatchConfig(global_size=8), layout, replica
            ).fetch(step)
            for replica in range(layout.dp)
        ]
        windows = [source.window(order.window(sample), 32) for sample in range(8 * (step - 1), 8 * step)]
        assert torch.cat([row.tokens for row in rows]).tolist() == [
            window[:-1].tolist() for window in windows
        ]
        assert torch.cat([row.targets for row in rows]).tolist() == [
            window[1:].tolist() for window in windows
        ]


@pytest.mark.parametrize(
    ("dp", "micro", "asked"), [(1, 2, 5), (3, 2, 5), (2, 4, 3), (4, 1, 3), (1, 1, 10_000)]
)
def test_validation_sequences_are_dealt_once(dp: int, micro: int, asked: int) -> None:
    source = ZipfWindows(2_000)
    seen: list[list[int]] = []
    lengths = set()
    for replica in range(dp):
        part = ValidationBatches(
            [source], sequence=32, sequences=asked, layout=Layout(dp=dp, micro_batch=micro), replica=replica
        )
        lengths.add(len(part.batch.tokens))
        seen += [
            row
            for row, weight in zip(part.batch.tokens.tolist(), part.weights.tolist(), strict=True)
            if weight
        ]
    count = min(asked, source.windows(32))
    assert len(lengths) == 1
    assert lengths.pop() % micro == 0
    assert sorted(seen) == sorted(source.window(index, 32)[:-1].tolist() for index in range(count))


# ---- optimizer -------------------------------------------------------------------------------------------
def test_learning_rate() -> None:
    config = LearningRateConfig(peak=1.0, final=0.1, warmup_steps=10)
    assert [learning_rate(config, step, 110) for step in (1, 5, 10, 60, 110, 120)] == pytest.approx(
        [0.1, 0.5, 1.0, 0.55, 0.1, 0.1]
    )
    assert learning_rate(LearningRateConfig(peak=1.0), 100, 100) == pytest.approx(0.1)
    assert learning_rate(LearningRateConfig(peak=1.0, schedule="constant"), 70, 100) == 1.0


def test_clip_factor() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(4.0, 0.0) == 1.0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_bad_numbers_stop_before_the_weights_change(poison: float) -> None:
    stopping = replace(recipe(llama()), stability=StabilityConfig(nonfinite="stop"))
    parts = build(Case(stopping, Layout(micro_batch=2)), 0)
    train_step(parts, 1, Wishes())
    with torch.no_grad():
        parts.stages[0].embedding.view(-1)[5 * 48] = poison
    before = [bucket.master.clone() for bucket in parts.buckets.buckets]
    with pytest.raises(NumericError, match=r"step 2: loss .* are not both finite"):
        train_step(parts, 2, Wishes())
    for bucket, master in zip(parts.buckets.buckets, before, strict=True):
        assert torch.equal(bucket.master, master) or math.isnan(poison)
        np.testing.assert_array_equal(bucket.master.numpy(), master.numpy())


# ---- edges -----------------------------------------------------------------------------------------------
def test_rank_env() -> None:
    variables = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "TORCHELASTIC_RUN_ID": "tiny-20260101.12",
    }
    env = read_rank_env(variables)
    assert (env.rank, env.local_rank, env.world_size, env.node_rank) == (3, 1, 8, 1)
    assert (env.run_id, env.attempt) == ("tiny-20260101", 12)
    with pytest.raises(UsageError) as raised:
        read_rank_env({**variables, "RANK": "x", "TORCHELASTIC_RUN_ID": "none"})
    assert raised.value.problems[0].message == (
        "a rank needs torchrun's variables: RANK is 'x', not a number; "
        "TORCHELASTIC_RUN_ID is 'none', not <run id>.<attempt>"
    )


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (NumericError("x"), "numeric"),
        (ConfigError([]), "config"),
        (CheckpointError("a save failed"), "storage"),
        (RestoreError(CheckpointError("none is whole")), "checkpoint"),
        (RestoreError(CheckpointError("cannot be read: Input/output error", may_pass=True)), "storage"),
        (CorpusError("x"), "data"),
        (OSError("disk"), "storage"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
            ),
            "communication",
        ),
        (ValueError("x"), "user_code"),
    ],
)
def test_error_class(error: Exception, name: str) -> None:
    assert error_class(error) == name
    assert describe(error).startswith(type(error).__name__)


def test_error_class_of_what_a_pipeline_wraps() -> None:
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = MemoryError()
    assert error_class(wrapped) == "out_of_memory"


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (llama(), Layout(tp=4), "tp=4 does not divide model.kv_heads=2"),
        (llama(), Layout(pp=8), "pp=8 x vpp=1 stages are more than 4 layers"),
        (llama(), Layout(vpp=2, schedule="interleaved"), "vpp=2 needs a pipeline"),
        (llama(kind="moe", experts=4), Layout(), "mixture-of-experts models are planned but not trained"),
        (llama(), Layout(cp=2), "the engine does not run cp=2"),
        (
            llama(),
            Layout(dp=3, zero=3),
            "zero=3 gathers weights in every micro-batch, so all replicas need as many: "
            "dp=3 does not divide 8",
        ),
        (llama(), Layout(dp=16), "8 micro-batches are fewer than dp=16 replicas"),
        (llama(), Layout(micro_batch=3), "micro_batch=3 does not divide batch.global=8"),
        (llama(norm=None), Layout(), "is not resolved; job.json must hold a complete model"),
    ],
)
def test_what_is_refused(model: Any, layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_supported(recipe(model), layout)
    assert message in [problem.message for problem in raised.value.problems]


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        check_supported(recipe(llama(heads=6), mode="fp8"), Layout(tp=4, cp=2))
    assert len(raised.value.problems) == 4
