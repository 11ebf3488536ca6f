"""Every layout trains like one process, and one process trains like a plain PyTorch loop."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from llmtrain.config.layout import Layout
from tests.support.engine_cases import (
    Case,
    Outcome,
    build,
    by_world_size,
    gpt,
    initial_weights,
    llama,
    recipe,
    run_case,
)
from tests.support.plain_loop import PlainTraining

pytestmark = pytest.mark.engine

FP32_TOLERANCE = 2e-5
"""On each of 20 losses of about 4; what sums in another order cost is below 1e-6."""
BF16_TOLERANCE = 5e-3
"""The same in BF16: rounding takes other ways, and 20 steps at a high rate amplify it."""


def fp32(model: Any, **layout: Any) -> Case:
    return Case(recipe(model), Layout(**{"micro_batch": 2, **layout}))


def bf16(model: Any, **layout: Any) -> Case:
    return Case(recipe(model, mode="bf16"), Layout(**{"micro_batch": 2, **layout}))


FAMILIES = {"llama": llama(), "gpt": gpt()}
SPECIAL = llama(qk_norm=True, qkv_bias=True, bias=True, tie_embeddings=True, vocab=101)

CASES: dict[str, Case] = {
    "special-tp2-sp": fp32(SPECIAL, tp=2, sequence_parallel=True),
    "special-tp2": fp32(SPECIAL, tp=2),
    "special-dp2-pp2": fp32(SPECIAL, dp=2, pp=2),
    "llama-zero0": fp32(llama(), dp=2, zero=0),
    "llama-micro1": fp32(llama(), dp=2, micro_batch=1),
    "llama-tp2-selective": fp32(llama(), tp=2, recompute="selective"),
    "gpt-tp2-full": fp32(gpt(), tp=2, recompute="full"),
    "llama-pp2-full": fp32(llama(), pp=2, recompute="full"),
    "gpt-pp2-vpp2": fp32(gpt(), pp=2, vpp=2, schedule="interleaved"),
    "gpt-pp2-zero-bubble": fp32(gpt(), pp=2, schedule="zero-bubble"),
    "llama-pp2-vpp2-zero-bubble": fp32(llama(), pp=2, vpp=2, schedule="zero-bubble"),
    "llama-dp2-pp2-vpp2": fp32(llama(), dp=2, pp=2, vpp=2, schedule="interleaved", micro_batch=1),
    "llama-pp2-heavy-head": fp32(llama(layers=6, vocab=800), pp=2),
    "llama-pp4-uneven": fp32(llama(layers=6), pp=4, micro_batch=1),
    "gpt-pp4-uneven": fp32(gpt(layers=6), pp=4, micro_batch=1),
    "llama-pp4-few-micro-batches": fp32(llama(), pp=4, micro_batch=4),
    "llama-tp4": fp32(llama(kv_heads=4), tp=4),
    "llama-3d-sp": fp32(llama(), dp=2, tp=2, pp=2, sequence_parallel=True),
    "gpt-3d-sp-zero-bubble": fp32(gpt(), dp=2, tp=2, pp=2, sequence_parallel=True, schedule="zero-bubble"),
}
for _name, _model in FAMILIES.items():
    CASES[f"{_name}-dp2"] = fp32(_model, dp=2)
    CASES[f"{_name}-tp2"] = fp32(_model, tp=2)
    CASES[f"{_name}-pp2"] = fp32(_model, pp=2)
    CASES[f"{_name}-tp2-sp"] = fp32(_model, tp=2, sequence_parallel=True)
    CASES[f"{_name}-dp3-uneven"] = fp32(_model, dp=3, micro_batch=1)
    CASES[f"{_name}-3d"] = fp32(_model, dp=2, tp=2, pp=2)
    for _axis in ("dp", "tp", "pp"):
        CASES[f"{_name}-{_axis}2-bf16"] = bf16(_model, **{_axis: 2})
    CASES[f"{_name}-3d-bf16"] = bf16(_model, dp=2, tp=2, pp=2)
CASES["llama-3d-bf16-again"] = CASES["llama-3d-bf16"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> outcome of each rank."""
    return by_world_size(CASES, tmp_path_factory.mktemp("worlds"))


@cache
def alone(case: Case) -> Outcome:
    """The same training in one process."""
    torch.set_num_threads(1)
    return run_case(0, dataclasses.replace(case, layout=Layout(micro_batch=case.layout.micro_batch)))


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("again")])
def test_a_layout_trains_like_one_process(name: str, outcomes: Any) -> None:
    case, ranks = CASES[name], outcomes(name)
    expected = alone(case)
    tolerance = BF16_TOLERANCE if case.recipe.precision.mode == "bf16" else FP32_TOLERANCE
    assert len(expected.losses) == 20
    assert ranks[0].losses == pytest.approx(expected.losses, abs=tolerance)
    assert ranks[0].validation == pytest.approx(expected.validation, abs=tolerance)
    if case.recipe.precision.mode == "fp32":
        assert ranks[0].norms == pytest.approx(expected.norms, rel=2e-4)
    for other in ranks[1:]:
        assert (other.losses, other.norms, other.validation) == (
            ranks[0].losses,
            ranks[0].norms,
            ranks[0].validation,
        )


def test_the_training_learns_and_clips() -> None:
    outcome = alone(CASES["llama-dp2"])
    assert outcome.losses[0] == pytest.approx(4.56, abs=0.05)  # about ln(96)
    assert outcome.losses[-1] < outcome.losses[0] - 0.8
    assert max(outcome.norms) > 1.0


@pytest.mark.parametrize(
    ("model", "mode", "tolerance"),
    [
        (llama(), "fp32", FP32_TOLERANCE),
        (gpt(), "fp32", FP32_TOLERANCE),
        (SPECIAL, "fp32", 1e-4),
        (llama(), "bf16", BF16_TOLERANCE),
        (gpt(), "bf16", BF16_TOLERANCE),
    ],
    ids=["llama-fp32", "gpt-fp32", "special-fp32", "llama-bf16", "gpt-bf16"],
)
def test_one_process_trains_like_a_plain_loop(model: Any, mode: str, tolerance: float) -> None:
    case = Case(recipe(model, mode=mode), Layout(micro_batch=2))
    plain = PlainTraining(case.recipe, initial_weights(case), case.layout.micro_batch)
    losses, norms = plain.run(build(case, 0).batches.fetch, 20)
    engine = alone(case)
    assert engine.losses == pytest.approx(losses, abs=tolerance)
    if mode == "fp32":
        assert engine.norms == pytest.approx(norms, rel=3e-3)


def test_the_same_layout_gives_the_same_bits(outcomes: Any) -> None:
    first, second = outcomes("llama-3d-bf16")[0], outcomes("llama-3d-bf16-again")[0]
    assert (first.losses, first.norms, first.validation) == (second.losses, second.norms, second.validation)


@pytest.mark.parametrize(
    ("name", "forward_backward", "sequence_parallel"),
    [("llama-tp2", 4, False), ("gpt-tp2", 4, False), ("llama-tp2-sp", 4, True), ("gpt-tp2-sp", 4, True)],
)
def test_a_layer_needs_two_collectives_each_way(
    name: str, forward_backward: int, sequence_parallel: bool, outcomes: Any
) -> None:
    case = CASES[name]
    micro_batches = case.recipe.batch.global_size // case.layout.micro_batch
    calls = outcomes(name)[0].calls["tp"]
    # Outside the layers: the embedding forward, the head backward, and one gather of the loss's statistics.
    expected = micro_batches * (case.recipe.model.layers * forward_backward + 2)
    if sequence_parallel:
        # Each is a pair, and the gradients of norms are summed once a step. The two column-parallel layers
        # and
        # the head keep their part of the input only and gather it again in the backward pass.
        again = micro_batches * (2 * case.recipe.model.layers + 1)
        assert calls == {
            "reduce_scatter": expected,
            "all_gather": expected + micro_batches + again,
            "all_reduce": 1,
        }
    else:
        assert calls == {"all_reduce": expected, "all_gather": micro_batches}


@pytest.mark.parametrize("name", [name for name in CASES if "bf16" not in name])
def test_one_collective_over_all_ranks_a_step(name: str, outcomes: Any) -> None:
    assert outcomes(name)[0].calls["world"] == {"all_reduce": 1}


def test_replicas_reduce_each_bucket_once(outcomes: Any) -> None:
    assert outcomes("llama-dp2")[0].calls["dp"] == {"reduce_scatter": 1, "all_gather": 1}
    assert outcomes("llama-zero0")[0].calls["dp"] == {"all_reduce": 1}
    # The tied embedding has a bucket of its own, summed over both ends of the pipeline.
    assert outcomes("gpt-3d")[0].calls["ends"] == {"all_reduce": 1}
