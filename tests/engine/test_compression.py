"""Gradients in fewer bytes: what a round trip loses, what error feedback gives back, and how it trains."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import ParallelConfig
from llmtrain.engine.parallel.compression import Codec
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import Wishes, train_step
from llmtrain.errors import ConfigError
from llmtrain.plan.layouts.supported import check_supported
from llmtrain.plan.memory.bucket_packing import BLOCK, encoded_bytes
from tests.support.engine_cases import Case, Outcome, build, llama, recipe, run_case, run_cases
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine


def case(communication: str, *, mode: str = "fp32", steps: int = 8, **layout: Any) -> Case:
    made = recipe(llama(), mode=mode, steps=steps)
    parallel = ParallelConfig(gradient_communication=communication)  # type: ignore[arg-type]
    return Case(replace(made, parallel=parallel), Layout(**{"micro_batch": 1, **layout}))


# ---- the formats -----------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(1, 4),
    blocks=st.integers(1, 5),
    exponent=st.integers(-25, 25),
    seed=st.integers(0, 2**31),
    zeros=st.booleans(),
)
def test_eight_bits_err_by_half_a_level_at_most(
    members: int, blocks: int, exponent: int, seed: int, zeros: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(members, blocks * BLOCK, generator=generator) * 10.0**exponent
    if zeros:
        values[:, :BLOCK] = 0.0
    codec, total = Codec("int8"), torch.empty(blocks * BLOCK)
    encoded = codec.encode(values.clone(), None)
    assert encoded.shape == (members, encoded_bytes(blocks * BLOCK, "int8"))
    codec.decode_sum(encoded, total)
    level = values.view(members, blocks, BLOCK).abs().amax(-1, keepdim=True) / 127
    allowed = (level * 0.5001).sum(0).expand(blocks, BLOCK) + 1e-29
    assert ((total.view(blocks, BLOCK) - values.sum(0).view(blocks, BLOCK)).abs() <= allowed * 1.01).all()


def test_what_is_rounded_away_is_sent_later() -> None:
    """The sum of what arrives is the sum of what was meant, but for one last rounding."""
    codec, shard = Codec("int8"), 2 * BLOCK
    errors, meant, arrived = torch.zeros(shard), torch.zeros(shard), torch.zeros(shard)
    total = torch.empty(shard)
    generator = torch.Generator().manual_seed(3)
    steady = torch.randn(shard, generator=generator) ** 3  # small numbers beside large ones
    plain = torch.zeros(shard)
    for _ in range(50):
        codec.decode_sum(codec.encode(steady.clone().view(1, -1), None), total)
        plain += total
        codec.decode_sum(codec.encode(steady.clone().view(1, -1), errors), total)
        arrived += total
        meant += steady
    torch.testing.assert_close(arrived + errors, meant, atol=1e-3, rtol=1e-5)
    assert (arrived - meant).abs().max() < (plain - meant).abs().max() / 20


@settings(max_examples=40, deadline=None)
@given(members=st.integers(1, 4), exponent=st.integers(-20, 20), seed=st.integers(0, 2**31))
def test_nothing_of_a_gradient_is_lost(members: int, exponent: int, seed: int) -> None:
    """What is sent and what is kept for the next step add up to the gradient and what was kept before, to the
    last bit of FP32."""
    generator = torch.Generator().manual_seed(seed)
    codec, shard = Codec("int8"), 2 * BLOCK
    errors, arrived = torch.zeros(members, shard), torch.empty(members, shard)
    for _ in range(4):
        gradient = torch.randn(members, shard, generator=generator) ** 3 * 10.0**exponent
        meant = gradient + errors
        encoded = codec.encode(gradient, errors)
        for row, total in zip(encoded, arrived, strict=True):
            codec.decode_sum(row.unsqueeze(0), total)
        assert torch.equal(arrived.double() + errors.double(), meant.double())


@pytest.mark.parametrize("communication", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_bad_numbers_arrive_as_bad_numbers(communication: str, poison: float) -> None:
    codec = Codec(communication)
    values, errors, total = torch.ones(2, BLOCK), torch.zeros(2 * BLOCK), torch.empty(BLOCK)
    values[1, 5] = poison
    codec.decode_sum(codec.encode(values, errors if codec.has_errors else None), total)
    assert not total.isfinite().all()
    assert errors.isfinite().all()


def test_bytes_on_the_wire() -> None:
    assert encoded_bytes(1024 * BLOCK, "int8") / encoded_bytes(1024 * BLOCK, "fp32") < 0.266
    assert encoded_bytes(1024 * BLOCK, "bf16") / encoded_bytes(1024 * BLOCK, "fp32") == 0.5


# ---- the training ----------------------------------------------------------------------------------------
CASES = {
    "fp32": case("fp32", dp=2),
    "bf16": case("bf16", dp=2),
    "fp16": case("fp16", dp=2),
    "int8": case("int8", dp=2),
    "int8-zero2": case("int8", dp=2, zero=2),
    "int8-zero3": case("int8", dp=2, zero=3),
}
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-3, "fp16": 5e-4, "int8": 2e-2}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    results = run_ranks(run_cases, 2, tmp_path_factory.mktemp("world"), list(CASES.values()))
    return {name: [rank[index] for rank in results] for index, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_compressed_gradients_train_alike(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    expected = run_case(0, case("fp32"))
    first, second = outcomes[name]
    tolerance = TOLERANCE[name.partition("-")[0]]
    assert first.losses == pytest.approx(expected.losses, abs=tolerance)
    assert (first.losses, first.norms) == (second.losses, second.norms)


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.266)])
def test_counted_bytes(name: str, share: float, outcomes: dict[str, list[Outcome]]) -> None:
    whole = outcomes["fp32"][0].bytes["dp"]["reduce_scatter"]
    assert outcomes[name][0].bytes["dp"]["all_to_all"] <= share * whole * 1.001 + 2 * BLOCK * 4
    assert "reduce_scatter" not in outcomes[name][0].bytes["dp"]


def resume(rank: int, world_size: int, root: str) -> tuple[list[float], list[float]]:
    """Losses after a save, of the run that went on, and of one that started from the save."""
    trained = case("int8", mode="bf16", dp=2, steps=6)
    parts = build(trained, rank)
    folder = CheckpointFolder(Path(root), "run", parts, writer="attempt 1")
    on = [train_step(parts, step, Wishes()).loss for step in range(1, 4)]
    folder.save(Progress(3, 24, 1e-3))
    on = [train_step(parts, step, Wishes()).loss for step in range(4, 7)]
    parts = build(trained, rank)
    CheckpointFolder(Path(root), "run", parts, writer="attempt 2").restore("newest")
    return on, [train_step(parts, step, Wishes()).loss for step in range(4, 7)]


def test_a_resume_repeats_the_losses(tmp_path: Path) -> None:
    went_on, resumed = run_ranks(resume, 2, tmp_path, str(tmp_path / "checkpoints"))[0]
    assert resumed == went_on


def test_unsharded_states_refuse_compression() -> None:
    with pytest.raises(ConfigError, match="int8 needs sharded states"):
        check_supported(case("int8", dp=2).recipe, Layout(dp=2, zero=0))
