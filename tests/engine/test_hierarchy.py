"""Two-level reduction: parity, and what crosses from node to node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import ParallelConfig
from llmtrain.engine.parallel.node_levels import node_levels
from tests.support.engine_cases import Case, Outcome, gpt, llama, recipe, run_case, run_cases
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine


def case(model: Any, ranks_per_node: int, communication: str = "fp32", **layout: Any) -> Case:
    parallel = ParallelConfig(gradient_communication=communication)  # type: ignore[arg-type]
    made = replace(recipe(model, steps=6), parallel=parallel)
    return Case(made, Layout(**{"micro_batch": 1, **layout}), ranks_per_node)


CASES = {
    "flat": case(llama(), 0, dp=4),
    "two-levels": case(llama(), 2, dp=4),
    "zero0": case(llama(), 2, dp=4, zero=0),
    "zero2": case(gpt(), 2, dp=4, zero=2),
    "zero3": case(llama(), 2, dp=4, zero=3),
    "int8": case(llama(), 2, "int8", dp=4),
    "one node has it all": case(llama(), 4, dp=4),
    "pipeline": case(gpt(), 2, dp=2, pp=2),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    results = run_ranks(run_cases, 4, tmp_path_factory.mktemp("world"), list(CASES.values()))
    return {name: [rank[index] for rank in results] for index, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_levels_train_like_one_process(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    expected = run_case(0, Case(CASES[name].recipe, Layout(micro_batch=1)))
    tolerance = 2e-2 if name == "int8" else 2e-5
    assert outcomes[name][0].losses == pytest.approx(expected.losses, abs=tolerance)
    for other in outcomes[name][1:]:
        assert (other.losses, other.norms) == (outcomes[name][0].losses, outcomes[name][0].norms)


def test_half_as_much_crosses_with_two_replicas_a_node(outcomes: dict[str, list[Outcome]]) -> None:
    flat, levels = outcomes["flat"][0].bytes, outcomes["two-levels"][0].bytes
    whole = flat["dp"]["reduce_scatter"]
    assert levels["dp-inside"]["reduce_scatter"] == whole
    assert levels["dp-across"]["reduce_scatter"] == whole / 2
    assert levels["dp-across"]["all_gather"] == whole / 2
    assert levels["dp"] == {}
    assert "dp-across" not in outcomes["one node has it all"][0].bytes
    assert "dp-across" not in outcomes["pipeline"][0].bytes
    encoded = outcomes["int8"][0].bytes
    assert encoded["dp-across"]["all_to_all"] < 0.266 * levels["dp-across"]["reduce_scatter"] + 4096


def test_which_replicas_share_nodes() -> None:
    # dp 4, tp 2 on nodes of four ranks: two replicas a node.
    assert node_levels((0, 2, 4, 6), 2, 4) == ((0, 2), (2, 6))
    assert node_levels((0, 2, 4, 6), 4, 4) == ((4, 6), (0, 4))
    assert node_levels((0, 2, 4, 6), 0, 8) is None  # one node
    assert node_levels((0, 8, 16), 8, 8) is None  # one replica a node
    assert node_levels((0, 1, 2), 1, 2) is None  # not the same number on each
