"""A resumed training goes on as if nothing had happened: bit for bit on the same layout, closely on any
other."""

from __future__ import annotations

import errno
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import BatchConfig, TrainConfig
from llmtrain.engine.failures import error_class
from llmtrain.engine.numerics.state import EXTRA_KEY, fresh_state, plain_state
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import Wishes, train_step
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.checkpoints.manifest import document_digest
from tests.support.engine_cases import Case, build, gpt, llama, recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

HALF, WHOLE = 5, 10
LAYOUT = Layout(dp=2, tp=2, pp=2, micro_batch=1)


def first_half(rank: int, world_size: int, case: Case, root: str) -> list[float]:
    """Train ten steps without a break; save after the fifth."""
    torch.set_num_threads(1)
    parts = build(case, rank)
    folder = CheckpointFolder(Path(root), "run", parts, writer="attempt 1")
    assert folder.restore("fresh")[0] == Progress()
    losses = []
    for step in range(1, WHOLE + 1):
        result = train_step(parts, step, Wishes())
        losses.append(result.loss)
        if step == HALF:
            folder.save(Progress(step, step * case.recipe.batch.global_size, result.rate))
    return losses


def second_half(rank: int, world_size: int, case: Case, root: str) -> list[float]:
    """Restore, then train the second five steps."""
    torch.set_num_threads(1)
    parts = build(replace(case, recipe=replace(case.recipe)), rank)
    parts.buckets.initialise(99)  # other weights: all must come from the checkpoint
    folder = CheckpointFolder(Path(root), "run", parts, writer="attempt 2")
    progress, name, _ = folder.restore("newest")
    assert (progress.step, name) == (HALF, "step-00000005")
    return [train_step(parts, step, Wishes()).loss for step in range(HALF + 1, WHOLE + 1)]


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
@pytest.mark.parametrize("model", [llama(), gpt(vocab=101)], ids=["llama", "gpt"])
def test_a_resume_repeats_the_losses(model: Any, mode: str, tmp_path: Path) -> None:
    case = Case(recipe(model, mode=mode, steps=WHOLE), LAYOUT)
    root = str(tmp_path / "checkpoints")
    losses = run_ranks(first_half, 8, tmp_path, case, root)[0]
    assert run_ranks(second_half, 8, tmp_path, case, root)[0] == losses[HALF:]
    tolerance = 5e-3 if mode == "bf16" else 2e-5
    for layout in (
        Layout(micro_batch=2),
        Layout(dp=3, micro_batch=1, zero=0),
        Layout(tp=2, sequence_parallel=True, micro_batch=2),
        Layout(pp=2, vpp=2, schedule="interleaved", micro_batch=1),
    ):
        resumed = run_ranks(second_half, layout.world_size, tmp_path, replace(case, layout=layout), root)
        assert resumed[0] == pytest.approx(losses[HALF:], abs=tolerance)


def _folder(case: Case, root: Path, run_id: str = "run") -> CheckpointFolder:
    return CheckpointFolder(root, run_id, build(case, 0), writer="attempt 1")


def test_a_run_with_checkpoints_never_starts_fresh(tmp_path: Path) -> None:
    case = Case(recipe(llama()), Layout(micro_batch=2))
    folder = _folder(case, tmp_path)
    progress, name, reason = folder.restore("newest")
    assert (progress.step, name, reason) == (0, None, "the run has not committed a checkpoint yet")
    folder.save(Progress(3, 24, 1e-3))
    with pytest.raises(CheckpointError, match="start fresh, but the run has checkpoints"):
        folder.restore("fresh")
    progress, name, reason = folder.restore("newest")
    assert (progress.step, progress.consumed_samples, progress.rate) == (3, 24, 1e-3)
    assert (name, reason) == ("step-00000003", "")


def test_damage_is_passed_over_and_told(tmp_path: Path) -> None:
    folder = _folder(Case(recipe(llama()), Layout(micro_batch=2)), tmp_path)
    folder.save(Progress(1, 8, 1e-3))
    newest = folder.save(Progress(2, 16, 1e-3))
    shard = newest.path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    progress, name, reason = folder.restore("newest")
    assert (progress.step, name) == (1, "step-00000001")
    assert "truncated" in reason
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none is whole") as raised:
        folder.restore("newest")
    assert error_class(raised.value) == "checkpoint"


def test_a_file_system_that_refuses_to_read_is_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, checksum: str) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    folder = _folder(Case(recipe(llama()), Layout(micro_batch=2)), tmp_path)
    folder.save(Progress(1, 8, 1e-3))
    monkeypatch.setattr(importlib.import_module("llmtrain.run.checkpoints.verify"), "has_checksum", refuse)
    with pytest.raises(CheckpointError, match="none is whole") as raised:
        folder.restore("newest")
    assert "cannot be read: Input/output error" in raised.value.text()
    assert error_class(raised.value) == "storage"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, train=TrainConfig(steps=20, seed=8)), "has seed 7, this run 8"),
        (
            lambda r: replace(r, model=llama(hidden=96)),
            "is of another model: hidden is 48 in it, 96 in this run",
        ),
        (lambda r: replace(r, batch=BatchConfig(global_size=4)), "consumed 8 samples in 1 steps, not 4"),
    ],
    ids=["seed", "model", "batch"],
)
def test_a_checkpoint_of_another_recipe_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    case = Case(recipe(llama()), Layout(micro_batch=2))
    _folder(case, tmp_path).save(Progress(1, 8, 1e-3))
    other = replace(case, recipe=change(case.recipe))
    with pytest.raises(CheckpointError, match=message) as raised:
        _folder(other, tmp_path).restore("newest")
    assert raised.value.problems[0].where == str(tmp_path / "step-00000001")
    assert "launch a new run" in raised.value.problems[0].hint
    assert error_class(raised.value) == "checkpoint"


NOTED = {
    "learning_rate": (),
    "model": (),
    "state": (),
    "loss": ("state", "probe_loss"),
    "updates": ("state", EXTRA_KEY),
}
"""What the engine notes in a manifest, and where in its `extra`."""


@pytest.mark.parametrize("name", NOTED)
def test_what_somebody_else_wrote_into_a_manifest_is_told_in_words(name: str, tmp_path: Path) -> None:
    """Right by its digest: it is refused, or has no meaning for this run, but nothing breaks."""
    case = Case(recipe(llama(layers=1)), Layout(micro_batch=2))
    folder = _folder(case, tmp_path)
    folder.save(Progress(1, 8, 1e-3, extra={EXTRA_KEY: plain_state(fresh_state(case.recipe))}))
    path = tmp_path / "step-00000001" / "manifest.json"
    original = path.read_text()
    refused = 0
    for value in (None, "x", [1], {"a": 1}, True, 1 << 70):
        document = json.loads(original)
        place = document["extra"]
        for key in NOTED[name]:
            place = place[key]
        place[name] = value
        document["digest"] = document_digest(document)
        path.write_text(json.dumps(document))
        try:
            folder.restore("newest")
        except CheckpointError as error:
            assert any("step-00000001" in problem.where for problem in error.problems), error.text()
            refused += 1
    assert refused >= 2


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = _folder(Case(recipe(llama()), Layout(micro_batch=2)), tmp_path)
    for step in range(1, 6):
        folder.save(Progress(step, 8 * step, 1e-3))
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [5, 4, 3]
