"""Where ranks lie: tensor groups inside nodes, pipelines under one switch, every rank once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.config.layout import Layout
from llmtrain.errors import RunError
from llmtrain.plan.placement import check_rank_order, near_pipelines, rank_order, ranks_on_nodes

POWERS = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and ranks per node that its tensor-parallel degree divides."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    per_node = tp * draw(st.sampled_from([1, 2, 4]))
    return Layout(tp=tp, pp=draw(POWERS), dp=draw(POWERS), cp=draw(st.sampled_from([1, 2]))), per_node


@given(layouts())
def test_every_rank_has_one_place_and_tensor_groups_stay_inside_nodes(case: tuple[Layout, int]) -> None:
    layout, per_node = case
    order = rank_order(layout, per_node)
    check_rank_order(order, layout.world_size)
    assert tuple(map(len, order)) == ranks_on_nodes(layout, per_node)
    node_of = {rank: node for node, ranks in enumerate(order) for rank in ranks}
    for group in layout.dims.groups("tp"):
        assert len({node_of[rank] for rank in group}) == 1


@given(layouts(), st.data())
def test_as_many_pipelines_as_possible_lie_under_one_switch(
    case: tuple[Layout, int], data: st.DataObject
) -> None:
    layout, per_node = case
    count = len(ranks_on_nodes(layout, per_node))
    switches = data.draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count))
    places = near_pipelines(layout, per_node, switches)
    assert sorted(places) == list(range(count)), "every machine once"
    if places == tuple(range(count)):
        return
    wide = count // layout.pp
    pipelines = [
        {switches[places[stage * wide + part]] for stage in range(layout.pp)} for part in range(wide)
    ]
    possible = sum(switches.count(switch) // layout.pp for switch in set(switches))
    assert sum(len(switches_of_one) == 1 for switches_of_one in pipelines) >= possible
    # What the planner calls a pipeline group lies on just those nodes.
    node_of = {rank: node for node, ranks in enumerate(rank_order(layout, per_node)) for rank in ranks}
    for group in layout.dims.groups("pp"):
        parts = {node_of[rank] % wide for rank in group}
        assert len(parts) == 1


def test_two_pipelines_on_two_switches() -> None:
    """Machines 0 and 2 hang on one switch, 1 and 3 on the other: stage 0 is nodes 0 and 1."""
    layout = Layout(pp=2, dp=2, tp=1)
    assert near_pipelines(layout, 1, ["a", "b", "a", "b"]) == (0, 1, 2, 3)
    assert near_pipelines(layout, 1, ["a", "a", "b", "b"]) == (0, 2, 1, 3)


@pytest.mark.parametrize(
    ("changes", "switches"),
    [
        ({"pp": 1, "dp": 4}, "aabb"),
        ({"pp": 2, "dp": 2}, "aaaa"),
        ({"pp": 2, "dp": 2}, ["a", "", "b", "b"]),
        ({"pp": 4, "dp": 1, "tp": 1}, "aab"),
    ],
)
def test_machines_keep_their_order(changes: dict[str, int], switches: str) -> None:
    layout = Layout(**{"tp": 1, **changes})
    assert near_pipelines(layout, 1, list(switches)) == tuple(range(len(switches)))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([(0, 1), (1, 2)], "rank 1 is placed twice, on node 0 and on node 1"),
        ([(0, 1), (2,)], "rank 3 is placed nowhere: 3 ranks on 2 nodes, 4 are needed"),
        ([(0, 1), (2, 3, 4)], "rank 4 does not exist"),
        ([], "rank 0 is placed nowhere"),
    ],
)
def test_duplicate_and_missing_ranks_are_refused(order: list[tuple[int, ...]], words: str) -> None:
    with pytest.raises(RunError, match=words):
        check_rank_order(order, 4)
