"""Whether a restored model is the one that was saved: the loss of one fixed sequence, then and now.

Checksums prove the bytes of a checkpoint; this proves what was made of them, in whatever layout: shards put
together wrongly, weights of another precision, a compute copy that was not refreshed. It costs one forward
pass of one micro-batch at every save and every restore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from llmtrain.engine.build import Parts
from llmtrain.errors import CheckpointError

KEY = "probe_loss"
"""Where a checkpoint's named state holds the loss."""
TOLERANCE: dict[str, float] = {"fp32": 1e-4, "tf32": 1e-3}
"""Relative difference that another layout, which sums in another order, may make, by precision mode."""
COARSE_TOLERANCE = 2e-2
"""Of the other modes, whose numbers have 8 to 11 bits."""
STRIDE, OFFSET = 7919, 13
"""The sequence: multiples of a prime modulo the vocabulary; it needs no corpus."""


class ContinuityError(CheckpointError):
    """A checkpoint is whole and of this run, and still another model comes out of it."""


def probe_loss(parts: Parts) -> float:
    """Mean token loss of the fixed sequence, the same number on all ranks, who call this together."""
    model, device = parts.recipe.model, parts.device
    micro_batch = parts.layout.micro_batch
    row = (torch.arange(model.sequence + 1, dtype=torch.int64) * STRIDE + OFFSET) % model.vocab
    # A whole micro-batch of it, since a pipeline's buffers have that size; the number is that of one.
    rows = row.repeat(micro_batch, 1)
    for stage in parts.stages:
        stage.eval()
    tokens, targets = (device.upload(part.contiguous()) for part in (rows[:, :-1], rows[:, 1:]))
    losses = parts.passes.evaluate(tokens, targets, None)
    for stage in parts.stages:
        stage.train()
    total = torch.zeros(1, dtype=torch.float64, device=device.torch_device)
    if losses is not None and parts.groups.tp.index == 0:
        total += losses[0]
    return float(parts.groups.world.all_reduce(total)) / parts.groups.dp.size / model.sequence


def note_probe(parts: Parts, state: MutableMapping[str, Any]) -> None:
    """Put the loss of the weights that are about to be saved into their named state."""
    loss = probe_loss(parts)
    mode = parts.recipe.precision.mode
    state[KEY] = {"loss": loss, "mode": mode} if math.isfinite(loss) else None


def check_probe(parts: Parts, state: Mapping[str, Any], where: str) -> None:
    """Compare restored weights with what was noted; on all ranks together. Raises ContinuityError, on all
    alike. A checkpoint without the number (imported, or older), or of another precision mode, is taken as it
    is."""
    noted, mode = state.get(KEY), parts.recipe.precision.mode
    if not isinstance(noted, dict) or noted.get("mode") != mode:
        return
    saved, found = noted.get("loss"), probe_loss(parts)
    if not isinstance(saved, int | float):
        raise ContinuityError("the loss that was noted when it was saved is not a number", where=where)
    tolerance = TOLERANCE.get(mode, COARSE_TOLERANCE)
    if not abs(found - saved) <= tolerance * abs(saved):
        raise ContinuityError(
            f"its weights are not those that were saved: a fixed sequence has loss {found:.6g} now, "
            f"{saved:.6g} when they were saved (tolerance {tolerance:g})",
            where=where,
        )
