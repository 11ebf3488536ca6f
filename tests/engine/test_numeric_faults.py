"""Injected faults x layouts: none reaches the weights, the training ends as without it, each is told.

The whole table needs `LLMTRAIN_TESTS_ALL_FAULTS=1`; otherwise a sample runs, with every kind of fault.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from tests.support.numeric_faults import (
    LAYOUTS,
    LONG,
    QUIET,
    STEPS,
    TABLE,
    Fault,
    Seen,
    fault_recipe,
    watch_all,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

ALL = bool(os.environ.get("LLMTRAIN_TESTS_ALL_FAULTS"))
SAMPLE = (0, 2, 3, 5, 6, 7, 8, 9, 10, 13, 18, 23, 26, 29, 37, 39)
ROWS = [row for at, row in enumerate(TABLE) if ALL or at in SAMPLE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(recipe, layout) -> what every rank saw; all runs of one world size share a launch."""
    folder: Path = tmp_path_factory.mktemp("worlds")
    wanted: dict[tuple[Recipe, Layout], None] = {}
    for row in ROWS:
        for pair in pairs(row):
            wanted[pair] = None

    @cache
    def world(size: int) -> dict[tuple[Recipe, Layout], list[Seen]]:
        mine = [pair for pair in wanted if pair[1].world_size == size]
        results = run_ranks(watch_all, size, folder, mine)
        return {pair: [seen[index] for seen in results] for index, pair in enumerate(mine)}

    return lambda pair: world(pair[1].world_size)[pair]


def pairs(row: Fault) -> tuple[tuple[Recipe, Layout], tuple[Recipe, Layout]]:
    """The run with the fault, and the clean one."""
    layout, steps = LAYOUTS[row.layout], LONG if row.fault.kind == "bad_batch" else STEPS
    faulty = fault_recipe(row.mode, (row.fault,), row.stability, steps=steps)
    return (faulty, layout), (fault_recipe(row.mode, steps=steps), layout)


def test_the_table_is_large_and_its_names_unique() -> None:
    assert len(TABLE) >= 30
    assert len({row.name for row in TABLE}) == len(TABLE)
    assert {row.fault.kind for row in ROWS} == {"nan", "overflow", "bad_batch", "bit_flip"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_fault_is_met(row: Fault, runs: Any) -> None:
    faulty, clean = (runs(pair) for pair in pairs(row))
    first = faulty[0]
    assert all(seen.all_finite for seen in faulty)
    assert first.losses[-1] == pytest.approx(clean[0].losses[-1], rel=row.tolerance)
    told = [(kind, fields) for _, kind, fields in first.told if kind not in QUIET]
    while told and told[-1][0] == "layer_precision_changed" and not told[-1][1]["wide"]:
        told.pop()  # back to normal, later
    assert tuple(kind for kind, _ in told) == row.told
    injected = [fields for _, kind, fields in first.told if kind == "fault_injected"]
    assert len(injected) == row.fault.steps
    if row.layer:
        named = [(fields["layer"], fields["rank"]) for kind, fields in told if kind == row.told[0]]
        assert set(named) == {(row.layer, row.fault.rank)}
    # The same decision everywhere, in the same step; as text, for a loss that is NaN equals nothing.
    assert len({repr((seen.losses, seen.told, seen.updates, seen.scale)) for seen in faulty}) == 1


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.mode == "fp32" and row.fault.kind == "nan"], ids=lambda row: row.name
)
def test_a_transient_fault_leaves_no_trace_in_fp32(row: Fault, runs: Any) -> None:
    faulty, clean = (runs(pair) for pair in pairs(row))
    assert [seen.weights for seen in faulty] == [seen.weights for seen in clean]
    assert faulty[0].losses == clean[0].losses


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.fault.kind == "bit_flip"], ids=lambda row: row.name
)
def test_the_rank_with_the_flipped_bit_is_named(row: Fault, runs: Any) -> None:
    faulty = runs(pairs(row)[0])
    [found] = [fields for _, kind, fields in faulty[0].told if kind == "corruption_found"]
    assert found["ranks"] == (row.fault.rank,)
