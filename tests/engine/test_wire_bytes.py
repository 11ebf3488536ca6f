"""What collectives carry in a step is, to the byte, what the planner says, on every rank and axis."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import ParallelConfig
from llmtrain.plan.timing.wire_bytes import WireBytes, replica_levels, sent_bytes
from llmtrain.plan.workload import make_workload
from tests.support.engine_cases import Case, gpt, llama, recipe, run_cases
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

BUCKET = 1_000_000.0
"""Smaller than the models below, so that there are several."""
SPECIAL = llama(qk_norm=True, qkv_bias=True, bias=True, tie_embeddings=True, vocab=101)


def case(model: Any, communication: str = "fp32", ranks_per_node: int = 0, **layout: Any) -> Case:
    parallel = ParallelConfig(gradient_communication=communication, bucket=BUCKET)  # type: ignore[arg-type]
    made = replace(recipe(model, steps=1, mode=layout.pop("mode", "fp32")), parallel=parallel)
    return Case(made, Layout(**{"micro_batch": 1, **layout}), ranks_per_node)


LARGE = {"hidden": 240, "head_dim": 60, "ffn_hidden": 320}
SP = {"sequence_parallel": True}
CASES = {
    "dp2": case(llama(**LARGE), dp=2),
    "dp2-bf16": case(llama(**LARGE), dp=2, mode="bf16"),
    "zero0": case(gpt(), dp=2, zero=0),
    "zero2": case(llama(**LARGE), dp=2, zero=2),
    "zero3": case(llama(**LARGE), dp=2, zero=3),
    "zero3-tied": case(gpt(**LARGE), dp=2, zero=3, mode="bf16"),
    "uneven": case(llama(), dp=3, zero=2),
    "int8": case(llama(**LARGE), "int8", dp=2),
    "bf16-gradients": case(gpt(), "bf16", dp=2, zero=2),
    "tp2": case(gpt(), tp=2),
    "tp2-sp": case(SPECIAL, tp=2, **SP),
    "tp2-full": case(llama(), tp=2, recompute="full"),
    "tp2-sp-full": case(gpt(), tp=2, recompute="full", **SP),
    "tp2-sp-selective": case(llama(), tp=2, recompute="selective", **SP),
    "pp2": case(gpt(), pp=2),
    "pp2-zero-bubble": case(llama(), pp=2, schedule="zero-bubble"),
    "pp2-interleaved": case(llama(), pp=2, vpp=2, schedule="interleaved"),
    "pp2-heavy-head": case(llama(layers=6, vocab=800), pp=2),
    "pp3-uneven": case(gpt(layers=5), pp=3, micro_batch=2),
    "two-levels": case(llama(**LARGE), ranks_per_node=2, dp=4),
    "two-levels-zero0": case(llama(), ranks_per_node=2, dp=4, zero=0),
    "two-levels-int8-zero3": case(llama(), "int8", 2, dp=4, zero=3),
    "dp2-tp2-zero3": case(SPECIAL, dp=2, tp=2, zero=3),
    "dp2-tp2-sp-zero2": case(gpt(), dp=2, tp=2, zero=2, **SP),
    "dp2-pp2-zero3-interleaved": case(gpt(), dp=2, pp=2, vpp=2, zero=3, schedule="interleaved"),
    "3d-sp": case(SPECIAL, dp=2, tp=2, pp=2, mode="bf16", **SP),
    "3d-zero2-zero-bubble": case(gpt(), "int8", dp=2, tp=2, pp=2, zero=2, schedule="zero-bubble"),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> each rank's bytes by axis and collective."""
    folder: Path = tmp_path_factory.mktemp("worlds")

    @cache
    def world(size: int) -> dict[str, list[dict[str, dict[str, int]]]]:
        names = [name for name, case in CASES.items() if case.layout.world_size == size]
        results = run_ranks(run_cases, size, folder, [CASES[name] for name in names])
        return {name: [rank[index].bytes for rank in results] for index, name in enumerate(names)}

    return lambda name: world(CASES[name].layout.world_size)[name]


def predicted(case: Case) -> WireBytes:
    levels = replica_levels(case.layout, case.ranks_per_node) if case.ranks_per_node else ()
    return WireBytes(make_workload(case.recipe), case.layout, bucket_bytes=int(BUCKET), levels=levels)


@pytest.mark.parametrize("name", CASES)
def test_counted_bytes_are_the_formulas(name: str, counted: Any) -> None:
    formula = predicted(CASES[name])
    for rank, axes in enumerate(counted(name)):
        found = {axis: names for axis, names in axes.items() if names and axis != "world"}
        assert found == formula.payloads(rank), f"rank {rank}"


def test_what_a_rank_sends() -> None:
    formula = predicted(CASES["dp2"])
    payloads = formula.payloads(0)
    sent = sent_bytes(payloads, formula.sizes)
    assert sent == {"dp": (payloads["dp"]["reduce_scatter"] + payloads["dp"]["all_gather"]) / 2}
    halves = predicted(CASES["int8"])
    shrunk = sent_bytes(halves.payloads(0), halves.sizes)["dp"] - payloads["dp"]["all_gather"] / 2
    assert shrunk == pytest.approx(0.258 * payloads["dp"]["reduce_scatter"] / 2, rel=0.01)
