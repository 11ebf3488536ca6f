"""ZeRO stages: every one trains like one process, whatever it is combined with; memory really falls."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.layout import Layout
from tests.support.engine_cases import Case, Outcome, gpt, llama, recipe, run_cases
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine


def case(model: Any, *, mode: str = "fp32", **layout: Any) -> Case:
    return Case(recipe(model, mode=mode, steps=8), Layout(**{"micro_batch": 1, **layout}))


TIED = llama(qk_norm=True, bias=True, qkv_bias=True, tie_embeddings=True, vocab=101)

CASES: dict[str, Case] = {
    "zero2": case(llama(), dp=2, zero=2),
    "zero3": case(llama(), dp=2, zero=3),
    "zero3-tied": case(gpt(), dp=2, zero=3),
    "zero2-tied": case(gpt(), dp=2, zero=2),
    "zero3-full": case(llama(), dp=2, zero=3, recompute="full"),
    "zero3-selective": case(TIED, dp=2, zero=3, recompute="selective"),
    "zero2-uneven": case(llama(), dp=3, zero=2),
    "zero3-pp2": case(gpt(), dp=2, pp=2, zero=3),
    "zero2-pp2-zero-bubble": case(llama(), dp=2, pp=2, zero=2, schedule="zero-bubble"),
    "zero3-pp2-zero-bubble": case(llama(), dp=2, pp=2, zero=3, schedule="zero-bubble"),
    "zero2-pp2-interleaved": case(llama(), dp=2, pp=2, vpp=2, zero=2, schedule="interleaved"),
    "zero3-pp2-interleaved": case(gpt(), dp=2, pp=2, vpp=2, zero=3, schedule="interleaved"),
    "zero2-tp2-sp": case(TIED, dp=2, tp=2, zero=2, sequence_parallel=True),
    "zero3-tp2-sp": case(gpt(), dp=2, tp=2, zero=3, sequence_parallel=True),
    "zero3-tp2": case(llama(), dp=2, tp=2, zero=3, recompute="full"),
    "zero2-3d": case(gpt(), dp=2, tp=2, pp=2, zero=2),
    "zero3-3d-sp": case(TIED, dp=2, tp=2, pp=2, zero=3, sequence_parallel=True),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("worlds")

    @cache
    def world(size: int) -> dict[str, list[Outcome]]:
        names = [name for name, case in CASES.items() if case.layout.world_size == size]
        results = run_ranks(run_cases, size, folder, [CASES[name] for name in names])
        return {name: [outcomes[index] for outcomes in results] for index, name in enumerate(names)}

    return lambda name: world(CASES[name].layout.world_size)[name]


@cache
def alone(recipe_: Any) -> Outcome:
    return run_cases(0, 1, [Case(recipe_, Layout(micro_batch=1))])[0]


@pytest.mark.parametrize("name", CASES)
def test_a_stage_trains_like_one_process(name: str, outcomes: Any) -> None:
    ranks, expected = outcomes(name), alone(CASES[name].recipe)
    assert ranks[0].losses == pytest.approx(expected.losses, abs=2e-5)
    assert ranks[0].norms == pytest.approx(expected.norms, rel=2e-4)
    assert ranks[0].validation == pytest.approx(expected.validation, abs=2e-5)
    for other in ranks[1:]:
        assert (other.losses, other.norms, other.validation) == (
            ranks[0].losses,
            ranks[0].norms,
            ranks[0].validation,
        )
