"""Who is slow: invented clusters with one culprit, and the pairings that find it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.backends.suspects import Measurements, rounds, second_opinions, suspicions

GOOD = 1e9


@given(st.integers(0, 40), st.integers(1, 50))
def test_rounds_are_a_tournament(count: int, most: int) -> None:
    names = [f"n{index}" for index in range(count)]
    found = rounds(names, most)
    for pairing in found:
        nodes = [node for pair in pairing for node in pair]
        assert len(nodes) == len(set(nodes)) == count - count % 2
    met = [frozenset(pair) for pairing in found for pair in pairing]
    assert len(met) == len(set(met)), "no pair twice"
    complete = max(0, count - 1 + count % 2)
    assert len(found) == min(most, complete)
    if most >= complete:
        assert set(met) == {frozenset(pair) for pair in itertools.combinations(names, 2)}


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 4))
def test_second_opinions_pair_suspects_with_the_trusted(suspects: int, trusted: int, most: int) -> None:
    bad, good = [f"b{index}" for index in range(suspects)], [f"g{index}" for index in range(trusted)]
    for pairing in second_opinions(bad, good, most):
        assert all(first in bad and second in good for first, second in pairing)
        assert len({second for _, second in pairing}) == len(pairing) == min(suspects, trusted)


def measured(
    count: int,
    slow: dict[frozenset[str], float],
    products: dict[str, list[float]] | None = None,
    most: int = 99,
) -> Measurements:
    """All pairs are good but for those in `slow`, by pair or by node."""
    names = [f"n{index}" for index in range(count)]
    pairs = {
        pair: GOOD * min([1.0, *(share for who, share in slow.items() if who <= set(pair))])
        for pairing in rounds(names, most)
        for pair in pairing
    }
    return Measurements(
        device="cuda" if products else "cpu",
        products=products or {name: [5e10] for name in names},
        pairs=pairs,
        errors={pair: "no answer" for pair, rate in pairs.items() if not rate},
    )


def convicted(found: Measurements) -> list[tuple[str, ...]]:
    return [each.nodes for each in suspicions(found)]


def test_equal_nodes_are_acquitted() -> None:
    for count in range(9):
        assert convicted(measured(count, {})) == []


@given(st.integers(3, 40), st.data(), st.floats(0.0, 0.35))
def test_one_slow_node_is_convicted_and_nobody_else(count: int, data: st.DataObject, share: float) -> None:
    culprit = f"n{data.draw(st.integers(0, count - 1))}"
    assert convicted(measured(count, {frozenset({culprit}): share}, most=7)) == [(culprit,)]


@given(st.integers(4, 12), st.data(), st.floats(0.0, 0.15))
def test_one_slow_link_is_not_blamed_on_its_nodes(count: int, data: st.DataObject, share: float) -> None:
    first, second = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=2)))
    [pair] = convicted(measured(count, {frozenset({f"n{first}", f"n{second}"}): share}))
    assert set(pair) == {f"n{first}", f"n{second}"}


def test_two_nodes_cannot_tell_who_it_is() -> None:
    assert convicted(measured(2, {frozenset({"n0"}): 0.1})) == []
    [broken] = suspicions(measured(2, {frozenset({"n0"}): 0.0}))
    assert (broken.nodes, broken.why) == (("n0", "n1"), "the all-reduce fails: no answer")


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_slow_gpu_is_named_by_its_number(share: float) -> None:
    products = {f"n{index}": [7e14] * 8 for index in range(4)}
    products["n2"][5] *= share
    [found] = suspicions(measured(4, {}, products))
    assert (found.nodes, found.gpu) == (("n2",), 5)
    assert found.why.startswith(f"GPU 5: matrix products run at {share:.0%} of the usual rate")


def test_a_busy_core_is_not_a_slow_one() -> None:
    products = {"n0": [5e10], "n1": [3e10], "n2": [4e10]}
    found = Measurements(device="cpu", products=products, pairs={}, errors={})
    assert suspicions(found) == []
    throttled = {**products, "n1": [1e10]}
    [slow] = suspicions(Measurements(device="cpu", products=throttled, pairs={}, errors={}))
    assert (slow.nodes, slow.gpu) == (("n1",), None)
