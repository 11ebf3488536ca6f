"""Faults that a rank meets by itself."""

from __future__ import annotations

import time

import pytest

from llmtrain.config.numerics import InjectedFault
from llmtrain.engine.disturbance import Disturbance

SECONDS = 0.2
FAULTS = (
    InjectedFault(kind="slow_disk", step=3, steps=2, rank=1, seconds=SECONDS),
    InjectedFault(kind="full_disk", step=6, rank=1),
)


def write_seconds(disturbance: Disturbance, step: int) -> float:
    disturbance.begin_step(step)
    started = time.monotonic()
    disturbance.before_write()
    return time.monotonic() - started


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_slow_disk_is_slow_in_its_steps_and_after_restarts(attempt: int) -> None:
    disturbance = Disturbance()
    disturbance.prepare(FAULTS, rank=1, attempt=attempt)
    assert [write_seconds(disturbance, step) >= SECONDS for step in (2, 3, 4, 5)] == [
        False,
        True,
        True,
        False,
    ]


def test_other_ranks_and_later_attempts_are_spared() -> None:
    disturbance = Disturbance()
    disturbance.prepare(FAULTS, rank=0, attempt=1)
    assert write_seconds(disturbance, 3) < SECONDS
    disturbance.prepare(FAULTS, rank=1, attempt=2)
    assert write_seconds(disturbance, 6) < SECONDS, "a restart makes room"
    disturbance.prepare(FAULTS, rank=1, attempt=1)
    with pytest.raises(OSError, match="on purpose"):
        write_seconds(disturbance, 6)
