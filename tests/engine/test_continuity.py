"""A checkpoint whose bytes are whole and whose model is another one is passed over, loudly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.layout import Layout
from llmtrain.engine import saving
from llmtrain.engine.continuity import KEY, probe_loss
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import Wishes, train_step
from tests.support.engine_cases import Case, build, llama, recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

LAYOUT = Layout(dp=1, tp=2, pp=1, micro_batch=2)
OTHER = Layout(dp=1, tp=1, pp=2, micro_batch=1)


def save_twice(rank: int, world_size: int, case: Case, root: str) -> tuple[list[float], dict[str, Any]]:
    """Two steps, each saved; then what the second save noted is made the loss of other weights."""
    torch.set_num_threads(1)
    parts = build(case, rank)
    folder = CheckpointFolder(Path(root), "run", parts, writer="attempt 1")
    folder.restore("fresh")
    losses, noted, extra = [], saving.note_probe, {}
    for step in (1, 2):
        result = train_step(parts, step, Wishes())
        progress = Progress(step, step * case.recipe.batch.global_size, result.rate)
        if step == 2:
            saving.note_probe = lambda parts, state: _note_wrongly(noted, parts, state)
        folder.save(progress)
        losses.append(probe_loss(parts))
        extra = progress.extra
    saving.note_probe = noted
    return losses, extra[KEY]


def _note_wrongly(note: Any, parts: Any, state: dict[str, Any]) -> None:
    note(parts, state)
    state[KEY]["loss"] *= 1.01


def restore(rank: int, world_size: int, case: Case, root: str) -> tuple[int, str, float]:
    torch.set_num_threads(1)
    parts = build(case, rank)
    folder = CheckpointFolder(Path(root), "run", parts, writer="attempt 2")
    progress, _, reason = folder.restore("newest")
    return progress.step, reason, probe_loss(parts)


def test_another_model_is_passed_over_in_any_layout(tmp_path: Path) -> None:
    case = Case(recipe(llama(), mode="fp32", global_batch=4), LAYOUT)
    results = run_ranks(save_twice, 2, tmp_path, case, str(tmp_path))
    losses, noted = results[0]
    assert results[0] == results[1], "all ranks know the same loss"
    assert noted["mode"] == "fp32" and losses[0] != losses[1]
    for layout in (LAYOUT, OTHER):
        again = Case(case.recipe, layout)
        for step, reason, loss in run_ranks(restore, 2, tmp_path, again, str(tmp_path)):
            assert step == 1
            assert "its weights are not those that were saved: a fixed sequence has loss" in reason
            assert loss == pytest.approx(losses[0], rel=1e-4)
