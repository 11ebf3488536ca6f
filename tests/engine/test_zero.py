"""ZeRO stages: every one trains like one process, whatever it is combined with; memory really falls."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.engine.step import Wishes, train_step
from llmtrain.engine.verify_plan import count_stage
from tests.engine.test_resume import HALF, WHOLE, first_half, second_half
from tests.support.engine_cases import Case, Outcome, build, by_world_size, gpt, llama, recipe, run_cases
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
    """Name -> outcome of each rank."""
    return by_world_size(CASES, tmp_path_factory.mktemp("worlds"))


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


def test_a_checkpoint_of_any_stage_loads_into_any_other(tmp_path: Path) -> None:
    """From ZeRO-3 with a pipeline to 2 and 1, and bit for bit to itself."""
    saved = Case(recipe(gpt(vocab=101), steps=WHOLE), Layout(dp=2, pp=2, zero=3))
    root = str(tmp_path / "checkpoints")
    losses = run_ranks(first_half, 4, tmp_path, saved, root)[0]
    assert run_ranks(second_half, 4, tmp_path, saved, root)[0] == losses[HALF:]
    for layout in (Layout(dp=2, zero=2), Layout(dp=2, tp=2, zero=3, sequence_parallel=True), Layout()):
        case = Case(saved.recipe, layout)
        resumed = run_ranks(second_half, layout.world_size, tmp_path, case, root)[0]
        assert resumed == pytest.approx(losses[HALF:], abs=2e-5)


def gradient_bytes(zero: int) -> int:
    """Most bytes of gradients that a rank of two holds at any time of a step, counted on the meta device."""
    spec = resolve("llama-8b", "a100-32x8")
    counted = count_stage(spec, Layout(dp=64, tp=4, zero=zero, sequence_parallel=True), 0, 2)
    return int(counted["gradients"] + counted["parameters"])


def test_memory_falls_with_the_stage() -> None:
    one, two, three = (gradient_bytes(zero) for zero in (1, 2, 3))
    assert two < 0.4 * one
    assert three < 0.1 * two


def storages(rank: int, world_size: int, zero: int) -> tuple[int, int]:
    """Bytes of parameters and of gradient sums that exist between two steps, and at most during one."""
    parts = build(
        Case(recipe(llama(layers=12, hidden=96, head_dim=24), steps=2), Layout(dp=2, zero=zero)), rank
    )
    most = 0

    def now() -> int:
        flats = [bucket.parameters.untyped_storage().nbytes() for bucket in parts.buckets.buckets]
        sums = [bucket.gradients for bucket in parts.buckets.buckets if bucket.gradients is not None]
        return sum(flats) + sum(total.untyped_storage().nbytes() for total in sums)

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, now())

    for block in parts.stages[0].blocks:
        block.register_forward_hook(watch)
        block.register_full_backward_hook(watch)
    train_step(parts, 1, Wishes())
    return now(), most


def test_sharded_parts_exist_only_while_they_are_needed(tmp_path: Path) -> None:
    (kept, _), _ = run_ranks(storages, 2, tmp_path, 1)
    (rest_2, most_2), _ = run_ranks(storages, 2, tmp_path, 2)
    (rest_3, most_3), _ = run_ranks(storages, 2, tmp_path, 3)
    assert rest_2 == pytest.approx(kept / 2, rel=0.02)  # all parameters, no gradients
    assert most_2 <= kept
    assert rest_3 < 0.05 * kept  # norms
    assert most_3 < 0.35 * kept
