"""Faults on purpose are told only where they act."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain.config.layout import Layout
from llmtrain.config.numerics import InjectedFault
from llmtrain.engine.numerics.rehearsal import why_idle
from tests.support.engine_cases import llama

pytestmark = pytest.mark.engine

MODEL = llama(layers=4)
LAYOUT = Layout(dp=2, pp=2, micro_batch=1)
"""Of four layers, ranks 0 and 1 hold 0 and 1, ranks 2 and 3 hold 2 and 3."""


@pytest.mark.parametrize(
    ("fault", "attempt", "reason"),
    [
        ({"kind": "nan", "rank": 1, "layer": 1}, 1, ""),
        ({"kind": "nan", "rank": 1, "layer": 1}, 2, ""),
        ({"kind": "nan", "rank": 1, "layer": 2}, 1, "rank 1 does not hold layer 2, but 0, 1"),
        ({"kind": "overflow", "rank": 2, "layer": 3}, 1, ""),
        ({"kind": "nan", "rank": 4}, 1, "there is no rank 4, ranks are 0 to 3"),
        ({"kind": "kill", "rank": 9}, 1, "there is no rank 9, ranks are 0 to 3"),
        ({"kind": "kill", "rank": 3}, 1, ""),
        ({"kind": "kill", "rank": 3}, 2, "it happens in the first attempt only"),
        ({"kind": "out_of_memory", "rank": 3}, 2, "it happens in the first attempt only"),
        ({"kind": "slow", "rank": 3}, 2, ""),
        ({"kind": "bad_batch", "rank": 9}, 2, ""),
    ],
)
def test_why_a_fault_does_nothing(fault: dict[str, Any], attempt: int, reason: str) -> None:
    assert why_idle(InjectedFault(step=1, **fault), MODEL, LAYOUT, attempt) == reason


def test_interleaved_chunks_and_zero_3() -> None:
    flip = InjectedFault(kind="bit_flip", step=1, rank=0, layer=2)
    assert not why_idle(flip, MODEL, replace(LAYOUT, vpp=2, schedule="interleaved"), 1)
    assert "zero 3" in why_idle(flip, MODEL, Layout(dp=2, zero=3), 1)
