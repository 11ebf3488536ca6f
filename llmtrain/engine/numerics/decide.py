"""What to do about a step whose numbers are known.

Pure: a function of the recipe, the state and the numbers that all ranks agreed on, so that all ranks do the
same in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from llmtrain.config.numerics import StabilityConfig
from llmtrain.config.recipe import Recipe
from llmtrain.engine.numerics.scaler import LOWEST
from llmtrain.engine.numerics.state import NumericState, with_accepted
from llmtrain.engine.numerics.windows import Spike, find_spike
from llmtrain.events.words import SpikeQuantity, Trouble


class Verdict(StrEnum):
    """What happens to a step."""

    APPLY = "apply"
    RECOMPUTE = "recompute"
    """Again, on the same data, in FP32."""
    SKIP = "skip"
    REWIND = "rewind"
    """Skip, and go back to the last snapshot."""
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A step's numbers over all ranks."""

    step: int
    loss: float
    """Mean over all tokens."""
    grad_norm: float
    """Of the unscaled gradients, before clipping."""
    corrupt: bool = False
    """Whether replicas' parameters differed."""

    @property
    def finite(self) -> bool:
        """Whether both may reach the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """A verdict, and why."""

    verdict: Verdict
    reason: Trouble | Literal[""] = ""
    """Empty for a clean step."""
    spikes: tuple[Spike, ...] = ()
    new_level: bool = False
    """Whether so many spikes came that the new level counts as normal from now on."""


def judge(recipe: Recipe, state: NumericState, seen: Numbers, *, recomputed: bool = False) -> Ruling:
    """The ruling on a pass; `recomputed` when it was the one in FP32."""
    stability = recipe.stability
    if seen.corrupt and not recomputed and stability.corruption.action != "log":
        stop = stability.corruption.action == "stop"
        return Ruling(verdict=Verdict.STOP if stop else Verdict.RECOMPUTE, reason="corruption")
    if seen.finite:
        return _judge_spikes(stability, state, seen)
    overflow = not recomputed and state.loss_scale is not None and math.isfinite(seen.loss)
    reason: Trouble = "overflow" if overflow else "nonfinite"
    if stability.nonfinite == "recover" and not recomputed:
        return Ruling(verdict=Verdict.RECOMPUTE, reason=reason)
    if overflow and state.scale > LOWEST:  # The scale finds its place; that is no fault of the data.
        return Ruling(verdict=Verdict.SKIP, reason=reason)
    if stability.nonfinite == "stop":
        return Ruling(verdict=Verdict.STOP, reason=reason)
    return Ruling(verdict=_skip_or_more(stability, state), reason=reason)


def _skip_or_more(stability: StabilityConfig, state: NumericState) -> Verdict:
    if state.skipped_in_a_row + 1 < stability.skipped_steps:
        return Verdict.SKIP
    return Verdict.REWIND if state.rewinds < stability.rewinds else Verdict.STOP


def _judge_spikes(stability: StabilityConfig, state: NumericState, seen: Numbers) -> Ruling:
    config = stability.spikes
    measured: tuple[tuple[SpikeQuantity, float, Sequence[float]], ...] = (
        ("loss", seen.loss, state.losses),
        ("grad_norm", seen.grad_norm, state.norms),
    )
    found = (find_spike(name, value, recent, config) for name, value, recent in measured)
    spikes = tuple(spike for spike in found if spike is not None)
    if not spikes:
        return Ruling(verdict=Verdict.APPLY)
    if state.spikes_in_a_row + 1 > config.patience:
        return Ruling(verdict=Verdict.APPLY, reason="spike", spikes=spikes, new_level=True)
    verdict = {"skip": Verdict.SKIP, "rewind": Verdict.REWIND}.get(config.action, Verdict.APPLY)
    return Ruling(verdict=verdict, reason="spike", spikes=spikes)


def settle(
    recipe: Recipe, state: NumericState, seen: Numbers, ruling: Ruling, *, overflow: bool, clean: bool
) -> NumericState:
    """The state after a step. `seen` are the numbers of the pass that counted, `overflow` whether the first
    one did, `clean` whether nothing was wrong at all."""
    if state.loss_scale is not None:
        scale = state.loss_scale.after(recipe.precision.loss_scale, overflow=overflow)
        state = replace(state, loss_scale=scale)
    if ruling.new_level:
        state = replace(state, losses=(), norms=(), spikes_in_a_row=0)
    if ruling.verdict is Verdict.APPLY:
        state = replace(with_accepted(state, recipe, seen.loss, seen.grad_norm), skipped_in_a_row=0)
    elif ruling.reason == "nonfinite" or (ruling.reason == "overflow" and state.scale <= LOWEST):
        state = replace(state, skipped_in_a_row=state.skipped_in_a_row + 1)
    state = replace(state, clean_steps=state.clean_steps + 1 if clean else 0)
    if ruling.verdict is Verdict.REWIND and ruling.reason != "spike":
        state = replace(state, rewinds=state.rewinds + 1, skipped_in_a_row=0)
    if ruling.spikes and not ruling.new_level:
        state = replace(state, spikes_in_a_row=state.spikes_in_a_row + 1)
    return _forgiven(recipe.stability, state)


def _forgiven(stability: StabilityConfig, state: NumericState) -> NumericState:
    needed = stability.forgive_steps if stability.spikes.action == "rewind" else 1
    if state.spikes_in_a_row and state.clean_steps >= needed:
        state = replace(state, spikes_in_a_row=0)
    if state.rewinds and state.clean_steps >= stability.forgive_steps:
        state = replace(state, rewinds=0)
    return state
