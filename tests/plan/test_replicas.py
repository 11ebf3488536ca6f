"""Copies of snapshots: on other nodes, every node keeps as many as it gives, and in another pipeline where
there is one."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest

from llmtrain.config.checkpoint import CheckpointConfig, MemoryTierConfig
from llmtrain.config.layout import Layout
from llmtrain.plan.memory.host_memory import host_copies, survives, too_few_nodes
from llmtrain.plan.memory.replicas import choose_replicas
from llmtrain.plan.placement import rank_order

LAYOUTS = [
    Layout(dp=4),
    Layout(dp=5),
    Layout(dp=2, tp=2, pp=2),
    Layout(dp=4, tp=2, pp=4),
    Layout(pp=8),
    Layout(dp=2, pp=4),
    Layout(dp=3, tp=2, pp=2),
]


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_so_many_nodes_may_be_lost(layout: Layout, per_node: int, copies: int) -> None:
    nodes = rank_order(layout, per_node)
    found = choose_replicas(layout.dims, nodes, copies)
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    wanted = min(copies, len(nodes) - 1)
    for rank, targets in enumerate(found.targets):
        assert len({node_of[rank], *(node_of[target] for target in targets)}) == 1 + wanted
        assert all(rank in found.sources(target) for target in targets)
    assert found.losable_nodes == wanted
    kept = Counter(node_of[target] for targets in found.targets for target in targets)
    if len({len(ranks) for ranks in nodes}) == 1:
        assert all(kept[number] == wanted * per_node for number in range(len(nodes)))
    if layout.dp == 1:
        assert found.in_same_pipeline == wanted * layout.world_size


def test_another_pipeline_is_preferred() -> None:
    """Of four nodes with a stage of two replicas each, the copy goes to the other replica's."""
    for layout, per_node in (
        (Layout(dp=2, pp=4), 1),
        (Layout(dp=4, tp=2, pp=4), 2),
        (Layout(dp=2, tp=4, pp=2), 4),
    ):
        assert (
            choose_replicas(layout.dims, rank_order(layout, per_node), 1).in_same_pipeline < layout.world_size
        )


def test_what_it_takes_and_survives_is_said() -> None:
    off = CheckpointConfig()
    assert host_copies(off, 0) == 2
    assert host_copies(CheckpointConfig(incremental=0), 0) == 1
    assert "memory tier is off" in survives(off, Layout(dp=4), 1)
    on = CheckpointConfig(memory=MemoryTierConfig(every_steps=10, copies=2))
    assert host_copies(on, 2) == 2 + 1 + 2 * 3
    assert "any 2 lost nodes at once, cost at most 10 steps" in survives(on, Layout(dp=4), 1)
    assert "the run has one node" in survives(on, Layout(dp=4), 8)
    assert "no nodes for more than 1 copies" in survives(on, Layout(dp=4), 2)
    assert "8 of 8 copies lie in their own replica" in survives(
        CheckpointConfig(memory=MemoryTierConfig(every_steps=10)), Layout(pp=8), 1
    )


@pytest.mark.parametrize(
    ("every", "copies", "per_node", "kept"),
    [(10, 1, 4, 0), (10, 2, 2, 1), (10, 2, 1, None), (10, 0, 4, None), (None, 1, 4, None)],
)
def test_copies_without_a_node_are_a_problem(
    every: int | None, copies: Literal[0, 1, 2], per_node: int, kept: int | None
) -> None:
    asked = CheckpointConfig(memory=MemoryTierConfig(every_steps=every, copies=copies))
    found = too_few_nodes(asked, Layout(dp=4), per_node)
    assert (None if found is None else found.message.rpartition(" ")[2]) == (
        None if kept is None else str(kept)
    )
    if found is not None:
        assert found.where == "checkpoint.memory.copies"
