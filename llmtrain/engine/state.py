"""The training state as pieces of logical tensors, to save and to load under any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.config.codec import digest, to_json
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.engine.checkpoint.pieces import Piece
from llmtrain.engine.parallel.buckets import Buckets
from llmtrain.engine.parallel.groups import Groups
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import CheckpointInfo, Manifest, notes_faults

PARTS: tuple[str, ...] = ("master", "exp_avg", "exp_avg_sq")
"""What is kept of every weight: itself and AdamW's two moments, all FP32. Key: `<tensor>/<part>`."""

OTHER_RECIPE_HINT = (
    "go on with the recipe that was saved (restore the run's job.json), or launch a new run for this recipe"
)


@dataclass(slots=True)
class Progress:
    """How far the training is."""

    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    """Global samples consumed."""
    rate: float = 0.0
    """Learning rate of the last step."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Named state of the whole run besides tensors, as JSON, alike on all ranks: a loss scale, counters. Rank
    0's is saved; every layout gets it back."""
    own: dict[str, Any] = field(default_factory=dict)
    """Named state of this rank alone, as JSON: a random generator's. Given back to the same rank of the same
    layout; empty after a change of layout, for there is nobody whose it is."""


def state_pieces(buckets: Buckets, groups: Groups) -> Iterator[Piece]:
    """Every piece that this rank holds. Of equal copies (tensor-parallel replicas, unsharded replicas, the
    other end's tied embedding) one has owner=True."""
    for bucket, parameter, number, flat_start, low, high in buckets.pieces():
        spec = parameter.spec
        logical = spec.pieces[number]
        owner = not (
            (spec.replicated_over_tp and groups.tp.index > 0)
            or (spec.shared_over_pp and groups.place.pp > 0)
            or (not bucket.sharded and groups.dp.index > 0)
        )
        for part in PARTS:
            yield Piece(
                key=f"{logical.name}/{part}",
                global_shape=logical.shape,
                box_start=logical.box_start,
                box_shape=logical.box_shape,
                flat_start=flat_start,
                data=getattr(bucket, part)[low:high],
                owner=owner,
            )


def recipe_digest(recipe: Recipe) -> str:
    """Digest that a checkpoint carries and a resume compares: the whole recipe."""
    return digest(to_json(recipe))


def checkpoint_info(recipe: Recipe, run_id: str, layout: Layout, progress: Progress) -> CheckpointInfo:
    """What a checkpoint says besides its tensors."""
    extra: dict[str, Any] = {
        "seed": recipe.train.seed,
        "learning_rate": progress.rate,
        "model": to_json(recipe.model),
        "state": deepcopy(progress.extra),  # it is written while training goes on
    }
    return CheckpointInfo(
        run_id=run_id,
        recipe_digest=recipe_digest(recipe),
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        layout=to_json(layout),
        extra=extra,
    )


def progress_of(manifest: Manifest, recipe: Recipe, layout: Layout, rank: int, checkpoint: Path) -> Progress:
    """Where a checkpoint stands, for a rank of a layout; raises CheckpointError when its seed, model or data
    cursor is not this run's."""
    info = manifest.info
    fault = next(iter(notes_faults(info)), "")
    if fault:
        raise CheckpointError(fault, where=str(checkpoint))
    fault = _recipe_fault(info, recipe)
    if fault:
        raise CheckpointError(fault, where=str(checkpoint), hint=OTHER_RECIPE_HINT)
    same_layout = _without_micro_batch(info.layout) == _without_micro_batch(to_json(layout))
    same_layout = same_layout and rank < len(manifest.shards)
    return Progress(
        info.step,
        info.consumed_samples,
        float(info.extra.get("learning_rate", 0.0)),
        extra=dict(info.extra.get("state") or {}),
        own=dict(manifest.shards[rank].state) if same_layout else {},
    )


def _without_micro_batch(layout: Mapping[str, Any]) -> dict[str, Any]:
    """A layout but for the micro-batch, which may change at any step and moves no rank's state."""
    return {name: value for name, value in layout.items() if name != "micro_batch"}


def _recipe_fault(info: CheckpointInfo, recipe: Recipe) -> str:
    if info.extra.get("seed") != recipe.train.seed:
        return f"has seed {info.extra.get('seed')!r}, this run {recipe.train.seed}"
    saved: Mapping[str, Any] = info.extra.get("model") or {}
    changed = [
        f"{name} is {saved[name]!r} in it, {value!r} in this run"
        for name, value in to_json(recipe.model).items()
        if name in saved and saved[name] != value
    ]
    if changed:
        return f"is of another model: {'; '.join(changed)}"
    expected = recipe.batch.samples_before(info.step + 1)
    if info.consumed_samples != expected:
        return f"consumed {info.consumed_samples} samples in {info.step} steps, not {expected}"
    return ""
