"""A run that is interrupted amid reactions goes on bit for bit: after a skip, a rewind, a scale that has
moved, a layer in another format, with the windows of spikes and of clipping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.layout import Layout
from llmtrain.config.numerics import ClipConfig, InjectedFault
from llmtrain.config.recipe import Recipe
from llmtrain.engine.numerics.state import EXTRA_KEY, plain_state, saved_state
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import Wishes, train_step
from llmtrain.errors import CheckpointError
from tests.support.engine_cases import Case, build
from tests.support.numeric_faults import REWINDS, fault_recipe, nan, overflow
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

STEPS = 14


def follow(rank: int, made: Recipe, layout: Layout, root: str, *, first: int, save: int) -> list[Any]:
    """Train from a step on; save after one. What every step did, with its state."""
    torch.set_num_threads(1)
    parts = build(Case(made, layout), rank)
    folder = CheckpointFolder(Path(root), "run", parts, writer=f"attempt {first}")
    parts.guard.reload = lambda: _reload(folder, parts)
    progress, _, _ = folder.restore("newest" if first > 1 else "fresh")
    assert progress.step == first - 1
    seen = []
    for step in range(first, STEPS + 1):
        result = train_step(parts, step, Wishes())
        told = [(event.kind, getattr(event, "layer", "")) for event in parts.guard.events]
        seen.append((repr(result.loss), repr(result.grad_norm), result.is_applied, told, parts.guard.state))
        saved = step == save
        if saved:
            state = {EXTRA_KEY: plain_state(parts.guard.state)}
            consumed = made.batch.samples_before(step + 1)
            folder.save(Progress(step, consumed, result.rate, extra=state))
        parts.guard.keep(step, saved=saved)
    seen.append([float(bucket.master.double().sum()) for bucket in parts.buckets.buckets])
    return seen


def _reload(folder: CheckpointFolder, parts: Any) -> tuple[int, int, str]:
    progress, name, _ = folder.restore("newest")
    return progress.step, parts.guard.state.updates, name or "seed"


def both(rank: int, world_size: int, cases: list[tuple[Recipe, Layout, str, int]]) -> list[tuple[Any, Any]]:
    """Each case in one go, and resumed from its checkpoint."""
    found = []
    for made, layout, root, save in cases:
        whole = follow(rank, made, layout, root, first=1, save=save)
        resumed = follow(rank, made, layout, root, first=save + 1, save=0)
        found.append((whole[save:], resumed))
    return found


def spoilt(mode: str, fault: InjectedFault, **stability: Any) -> Recipe:
    made = fault_recipe(mode, (fault,), stability, steps=STEPS)
    return replace(made, clip=ClipConfig(percentile=50, window=12))


CASES: dict[str, tuple[Recipe, int, str]] = {
    "scale-has-moved": (spoilt("fp16", overflow(4, layer=1, steps=5)), 6, "loss_scaled"),
    "amid-skips": (spoilt("bf16", nan(5, layer=2, passes=2, steps=3), snapshot_every=3), 6, "rewound"),
    "checkpoint-rewind": (spoilt("bf16", nan(5, layer=2, passes=2, steps=3)), 6, "rewound"),
    "layer-is-wide": (spoilt("bf16", overflow(5, layer=3, steps=2)), 7, "layer_precision_changed"),
    "window-of-spikes": (spoilt("bf16", nan(12, layer=0), **REWINDS), 9, "step_recomputed"),
}


@pytest.mark.parametrize("layout", [Layout(micro_batch=2), Layout(dp=2, micro_batch=2)], ids=["one", "dp2"])
def test_a_resume_amid_reactions_repeats_them(layout: Layout, tmp_path: Path) -> None:
    names = list(CASES) if layout.world_size == 1 else ["scale-has-moved", "checkpoint-rewind"]
    cases = [(CASES[name][0], layout, str(tmp_path / name), CASES[name][1]) for name in names]
    alone = layout.world_size == 1
    found = both(0, 1, cases) if alone else run_ranks(both, 2, tmp_path, cases)[0]
    for name, (whole, resumed) in zip(names, found, strict=True):
        assert resumed == whole, name
        told = {kind for entry in whole[:-1] for kind, _ in entry[3]}
        assert CASES[name][2] in told, name


def test_a_damaged_state_is_refused_and_an_absent_one_is_fresh() -> None:
    made = fault_recipe("fp16")
    with pytest.raises(CheckpointError, match="numerics state is not readable"):
        saved_state(made, {EXTRA_KEY: {"updates": "many"}}, 5, "x")
    with pytest.raises(CheckpointError, match="numerics state is not readable"):
        saved_state(made, {EXTRA_KEY: 3}, 5, "x")
    assert saved_state(made, {}, 5, "x").updates == 5
    other = saved_state(fault_recipe("bf16"), {EXTRA_KEY: plain_state(saved_state(made, {}, 5, "x"))}, 5, "x")
    assert other.loss_scale is None
