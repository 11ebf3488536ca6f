"""What the reactions to bad numbers remember: the same on all ranks, and part of every checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmtrain.config.codec import from_json, to_json
from llmtrain.config.recipe import Recipe
from llmtrain.engine.numerics.layer_precision import LayerRecord
from llmtrain.engine.numerics.scaler import LossScale
from llmtrain.engine.numerics.windows import clip_threshold, pushed
from llmtrain.errors import CheckpointError, ConfigError

EXTRA_KEY = "numerics"
"""Name of this state among what a checkpoint says besides its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericState:
    """Everything that a later decision depends on."""

    updates: int = 0
    """Updates that the weights contain: steps, but for those skipped or taken back."""
    loss_scale: LossScale | None = None
    """None unless the mode is fp16."""
    losses: tuple[float, ...] = ()
    """Recent accepted losses, for spikes."""
    norms: tuple[float, ...] = ()
    """Recent accepted gradient norms, for spikes."""
    clip_norms: tuple[float, ...] = ()
    """Recent gradient norms, for adaptive clipping."""
    layers: dict[str, LayerRecord] = field(default_factory=dict)
    """Layers with alarms."""
    clean_steps: int = 0
    """Steps in a row without any reaction."""
    skipped_in_a_row: int = 0
    rewinds: int = 0
    """Rewinds for numbers that were not finite, not yet forgiven."""
    spikes_in_a_row: int = 0
    """Spikes not yet forgiven."""

    @property
    def scale(self) -> float:
        """Factor of the loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale


def fresh_state(recipe: Recipe) -> NumericState:
    """The state before the first step."""
    precision = recipe.precision
    scale = LossScale(scale=precision.loss_scale.initial) if precision.mode == "fp16" else None
    return NumericState(loss_scale=scale)


def saved_state(recipe: Recipe, extra: Mapping[str, Any], step: int, where: str) -> NumericState:
    """The state in what a checkpoint of a step says; one that does not know of it has seen no reaction.

    Raises CheckpointError when it is damaged. A run that changed its mode keeps what still has a meaning.
    """
    fresh = fresh_state(recipe)
    saved = extra.get(EXTRA_KEY)
    if saved is None:
        return replace(fresh, updates=step)
    try:
        state = from_json(NumericState, saved)
    except (ConfigError, AttributeError) as error:
        raise CheckpointError(f"its numerics state is not readable: {error}", where=where) from error
    if not 0 <= state.updates <= step:
        raise CheckpointError(f"its numerics state has {state.updates} updates in {step} steps", where=where)
    same_mode = (state.loss_scale is None) == (fresh.loss_scale is None)
    return state if same_mode else replace(state, loss_scale=fresh.loss_scale)


def plain_state(state: NumericState) -> dict[str, Any]:
    """The state as JSON, for a checkpoint."""
    return to_json(state)


def clip_limit(recipe: Recipe, state: NumericState) -> float:
    """Largest global gradient norm of the next step; 0: no clipping."""
    return clip_threshold(recipe.clip, state.clip_norms)


def with_accepted(state: NumericState, recipe: Recipe, loss: float, norm: float) -> NumericState:
    """The state after an update with these numbers."""
    spikes = recipe.stability.spikes
    watched = spikes.action != "off"
    return replace(
        state,
        updates=state.updates + 1,
        losses=pushed(state.losses, loss, spikes.window) if watched else (),
        norms=pushed(state.norms, norm, spikes.window) if watched else (),
        clip_norms=pushed(state.clip_norms, norm, recipe.clip.window)
        if recipe.clip.percentile is not None
        else (),
    )
