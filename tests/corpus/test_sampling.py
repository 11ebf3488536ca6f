"""The sample order: a bijection in every epoch, independent of layout and history, and the same for ever."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.layout import Layout
from llmtrain.corpus.sampling import SampleOrder


@settings(max_examples=150, deadline=None)
@given(windows=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_window_once(windows, seed, epoch):
    order = SampleOrder(windows, seed)
    first = epoch * windows
    assert sorted(order.window(sample) for sample in range(first, first + windows)) == list(range(windows))


@given(
    windows=st.integers(1, 10**15),
    seed=st.integers(0, 2**63),
    samples=st.lists(st.integers(0, 10**18), min_size=1),
)
def test_pure_function_of_seed_and_sample(windows, seed, samples):
    """Whatever was asked before, and of whichever object."""
    used = SampleOrder(windows, seed)
    inside = [used.window(sample) for sample in samples]
    assert all(0 <= window < windows for window in inside)
    assert inside == [SampleOrder(windows, seed).window(sample) for sample in samples]
    assert inside[::-1] == [used.window(sample) for sample in reversed(samples)]


GOLDEN = {
    (10, 0): [5, 0, 3, 9, 1, 6, 8, 7, 2, 4, 9, 2, 6, 0, 7, 5, 3, 1, 4, 8],
    (93_965, 0): [
        14749,
        76672,
        18424,
        74864,
        49404,
        2094,
        30692,
        44189,
        34031,
        12888,
        61728,
        26626,
        37149,
        67110,
        60626,
        93420,
        56767,
        24468,
        62990,
        6323,
    ],
    (1_000_000_007, 1234): [
        277383197,
        574553705,
        825911641,
        922220792,
        13800477,
        418345958,
        628165352,
        464641222,
        488256459,
        604163440,
        221016014,
        291568132,
        611145267,
        713866462,
        757971918,
        268833792,
        380099533,
        489296989,
        418008207,
        758826500,
    ],
    (2**41 + 1, 2**64 + 5): [
        263697707251,
        396140211722,
        901245840421,
        312020973702,
        1437039598795,
        582506366667,
        1151709494291,
        1241715395218,
        1227801610359,
        1193468681791,
        493104701308,
        878725358034,
        2046092095590,
        610252224543,
        513314219144,
        518147864898,
        156232122974,
        1635298901526,
        1283098480614,
        763551667728,
    ],
}
"""(windows, seed) -> windows of the first 20 samples. A change here makes every checkpoint resume on other
data."""


def test_the_order_never_changes():
    for (windows, seed), expected in GOLDEN.items():
        order = SampleOrder(windows, seed)
        assert [order.window(sample) for sample in range(20)] == expected, (windows, seed)


def test_golden_values_far_into_later_epochs():
    order = SampleOrder(93_965, 7)
    assert [order.window(93_965 * epoch + 12_345) for epoch in (0, 1, 2, 1000)] == [
        10263,
        74824,
        40516,
        60680,
    ]


def test_seeds_and_epochs_give_unrelated_orders():
    """A random permutation has one fixed point on average; two orders of 1,000 share about one place."""
    orders = [
        [SampleOrder(1000, seed).window(epoch * 1000 + place) for place in range(1000)]
        for seed in range(5)
        for epoch in range(4)
    ]
    orders.append(list(range(1000)))
    for number, first in enumerate(orders):
        for second in orders[:number]:
            assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_neighbours_are_scattered():
    """Mean distance of consecutive windows of a random order is a third of their number."""
    order = SampleOrder(10_000, 3)
    places = [order.window(sample) for sample in range(10_000)]
    distance = sum(abs(a - b) for a, b in pairwise(places)) / 9_999
    assert 3_100 < distance < 3_570


def consumed(steps, layouts, global_batch, windows, seed):
    """Windows in global order, as the replicas of changing layouts read them."""
    order = SampleOrder(windows, seed)
    read = []
    for step, layout in zip(range(steps), layouts, strict=True):
        samples = []
        for replica in range(layout.dp):
            first = step * global_batch + layout.first_sample(replica, global_batch)
            count = layout.micro_batches(global_batch)[replica] * layout.micro_batch
            samples += range(first, first + count)
        assert samples == list(range(step * global_batch, (step + 1) * global_batch))
        read += [order.window(sample) for sample in samples]
    return read


def test_the_same_samples_for_every_dp_and_across_changes_in_mid_epoch():
    windows, batch, steps = 101, 24, 13
    reference = consumed(steps, [Layout()] * steps, batch, windows, 5)
    for dp in (1, 2, 3, 4, 5, 7, 8):
        assert consumed(steps, [Layout(dp=dp)] * steps, batch, windows, 5) == reference
    rng = random.Random(1)
    changing = [Layout(dp=rng.choice([1, 2, 3, 4, 5, 7, 8])) for _ in range(steps)]
    assert consumed(steps, changing, batch, windows, 5) == reference


def test_no_work_that_grows_with_the_corpus():
    def seconds(windows):
        order = SampleOrder(windows, 0)
        begin = time.process_time()
        for sample in range(2000):
            order.window(sample * 7919)
        return time.process_time() - begin

    assert seconds(10**15) < 20 * seconds(1000) + 0.5


@pytest.mark.parametrize(("windows", "seed"), [(0, 1), (-3, 1), (5, -1)])
def test_impossible_orders_are_refused(windows, seed):
    with pytest.raises(ValueError, match=r"no sample order|must not be negative"):
        SampleOrder(windows, seed)


def test_a_negative_sample_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        SampleOrder(5, 1).window(-1)
