"""Many nodes at once: nobody waits for the one that hangs."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from llmtrain.transport.base import TransportError
from llmtrain.transport.parallel import in_parallel


def test_results_and_failures_in_the_order_of_the_work() -> None:
    def work(number: int) -> int:
        time.sleep(0.02 * (5 - number))
        if number == 3:
            raise TransportError("no")
        return number * number

    results, failures = in_parallel({number: partial(work, number) for number in range(5)}, seconds=5)
    assert list(results.items()) == [(0, 0), (1, 1), (2, 4), (4, 16)]
    assert {key: str(error) for key, error in failures.items()} == {3: "no"}


def test_hanging_node_is_named_and_not_waited_for() -> None:
    gate = threading.Event()
    began = time.monotonic()
    results, failures = in_parallel({"node1": lambda: 1, "node2": gate.wait}, seconds=0.3)
    assert time.monotonic() - began < 1.0
    assert results == {"node1": 1}
    assert str(failures["node2"]) == "node2: not done after 0.3 s"
    gate.set()


def test_without_a_limit_all_of_it_is_waited_for() -> None:
    work = {number: partial(time.sleep, 0.01 * number) for number in range(5)}
    assert in_parallel(work, seconds=None) == (dict.fromkeys(range(5)), {})


def test_more_work_than_threads() -> None:
    results, _ = in_parallel({number: partial(int, number) for number in range(200)}, seconds=10, width=4)
    assert list(results) == list(range(200))


def test_other_errors_are_raised() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_parallel({1: broken}, seconds=5)


def test_nothing_to_do() -> None:
    assert in_parallel({}, seconds=0.0) == ({}, {})
