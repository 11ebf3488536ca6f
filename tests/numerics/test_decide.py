"""The ruling on every step: a table of what was seen, and whole stories of steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from llmtrain.config.model import ModelConfig
from llmtrain.config.numerics import CorruptionConfig, PrecisionConfig, SpikeConfig, StabilityConfig
from llmtrain.config.recipe import BatchConfig, Recipe, TrainConfig
from llmtrain.engine.numerics.decide import Numbers, Verdict, judge, settle
from llmtrain.engine.numerics.scaler import LossScale
from llmtrain.engine.numerics.state import NumericState, fresh_state

NAN, INF = math.nan, math.inf


def recipe(mode: str = "bf16", **stability: Any) -> Recipe:
    return Recipe(
        name="case",
        model=ModelConfig(kind="llama", layers=4, hidden=64, heads=4, vocab=256, sequence=32),
        batch=BatchConfig(global_size=8),
        precision=PrecisionConfig(mode=mode),  # type: ignore[arg-type]
        stability=StabilityConfig(**stability),
        train=TrainConfig(steps=100),
    )


def seen(loss: float = 2.0, norm: float = 0.5, *, step: int = 9, corrupt: bool = False) -> Numbers:
    return Numbers(step=step, loss=loss, grad_norm=norm, corrupt=corrupt)


FULL = NumericState(losses=(2.0, 2.02) * 32, norms=(0.5, 0.52) * 32)
LOW = LossScale(scale=8.0)
HALF = fresh_state(recipe("fp16"))
STOPS, LOGS = CorruptionConfig(action="stop"), CorruptionConfig(action="log")


@pytest.mark.parametrize(
    ("made", "state", "numbers", "recomputed", "verdict", "reason"),
    [
        (recipe(), FULL, seen(), False, "apply", ""),
        (recipe(), FULL, seen(NAN), False, "recompute", "nonfinite"),
        (recipe(), FULL, seen(2.0, INF), False, "recompute", "nonfinite"),
        (recipe(), FULL, seen(NAN), True, "skip", "nonfinite"),
        (recipe(), replace(FULL, skipped_in_a_row=2), seen(NAN), True, "rewind", "nonfinite"),
        (recipe(), replace(FULL, skipped_in_a_row=2, rewinds=2), seen(NAN), True, "stop", "nonfinite"),
        (recipe(rewinds=0, skipped_steps=1), FULL, seen(NAN), True, "stop", "nonfinite"),
        (recipe(nonfinite="skip"), FULL, seen(NAN), False, "skip", "nonfinite"),
        (recipe(nonfinite="stop"), FULL, seen(2.0, NAN), False, "stop", "nonfinite"),
        (recipe("fp16"), fresh_state(recipe("fp16")), seen(2.0, INF), False, "recompute", "overflow"),
        (recipe("fp16"), fresh_state(recipe("fp16")), seen(NAN, INF), False, "recompute", "nonfinite"),
        # The scale's search for its limit is no reason to stop, nor to rewind.
        (
            recipe("fp16", nonfinite="stop"),
            fresh_state(recipe("fp16")),
            seen(2.0, INF),
            False,
            "skip",
            "overflow",
        ),
        (
            recipe("fp16", nonfinite="skip", skipped_steps=1),
            fresh_state(recipe("fp16")),
            seen(2.0, INF),
            False,
            "skip",
            "overflow",
        ),
        (
            recipe("fp16", nonfinite="skip", skipped_steps=1),
            NumericState(loss_scale=LOW),
            seen(2.0, INF),
            False,
            "rewind",
            "overflow",
        ),
        (recipe(), FULL, seen(corrupt=True), False, "recompute", "corruption"),
        (recipe(), FULL, seen(corrupt=True), True, "apply", ""),
        (
            recipe(corruption=CorruptionConfig(action="stop")),
            FULL,
            seen(corrupt=True),
            False,
            "stop",
            "corruption",
        ),
        (recipe(corruption=CorruptionConfig(action="log")), FULL, seen(corrupt=True), False, "apply", ""),
        (recipe(), FULL, seen(9.0), False, "apply", "spike"),
        (recipe(spikes=SpikeConfig(action="skip")), FULL, seen(9.0), False, "skip", "spike"),
        (recipe(spikes=SpikeConfig(action="rewind")), FULL, seen(2.0, 7.0), False, "rewind", "spike"),
        (recipe(spikes=SpikeConfig(action="off")), FULL, seen(9.0), False, "apply", ""),
        (
            recipe(spikes=SpikeConfig(action="skip")),
            replace(FULL, spikes_in_a_row=5),
            seen(9.0),
            False,
            "apply",
            "spike",
        ),
    ],
)
def test_rulings(
    made: Recipe, state: NumericState, numbers: Numbers, recomputed: bool, verdict: str, reason: str
) -> None:
    ruling = judge(made, state, numbers, recomputed=recomputed)
    assert (ruling.verdict, ruling.reason) == (verdict, reason)


def story(
    made: Recipe, losses: list[float], state: NumericState | None = None
) -> tuple[list[str], NumericState]:
    """Verdicts of steps with these losses, the FP32 pass seeing the same, and the state after them."""
    state, verdicts = state or fresh_state(made), []
    for step, loss in enumerate(losses, 1):
        first = ruling = judge(made, state, seen(loss, step=step))
        if ruling.verdict is Verdict.RECOMPUTE:
            ruling = judge(made, state, seen(loss, step=step), recomputed=True)
        clean = first.verdict is Verdict.APPLY and not ruling.spikes
        overflow = first.reason in ("overflow", "nonfinite")
        state = settle(made, state, seen(loss, step=step), ruling, overflow=overflow, clean=clean)
        verdicts.append(str(ruling.verdict))
        if ruling.verdict is Verdict.STOP:
            break
    return verdicts, state


def test_tries_are_bounded() -> None:
    verdicts, _ = story(recipe(), [2.0] * 3 + [NAN] * 50)
    assert verdicts == ["apply"] * 3 + (["skip", "skip", "rewind"] * 2) + ["skip", "skip", "stop"]


def test_clean_steps_forgive() -> None:
    losses = ([NAN] * 3 + [2.0] * 100) * 5
    verdicts, state = story(recipe(), losses)
    assert verdicts.count("rewind") == 5
    assert (state.rewinds, state.skipped_in_a_row, state.updates) == (0, 0, 500)
    assert "stop" in story(recipe(), ([NAN] * 3 + [2.0] * 99) * 5)[0]


def test_a_new_level_is_accepted_in_the_end() -> None:
    made = recipe(spikes=SpikeConfig(action="skip", window=8, patience=3))
    verdicts, state = story(made, [2.0] * 8 + [3.0] * 6)
    assert verdicts == ["apply"] * 8 + ["skip"] * 3 + ["apply"] * 3
    assert state.losses == (3.0,) * 3


def test_the_scale_follows_the_first_pass() -> None:
    _, state = story(recipe("fp16"), [2.0, NAN, 2.0])
    assert state.loss_scale == LossScale(scale=2.0**15, clean_steps=1, overflows=1)


def test_windows_hold_accepted_values_only() -> None:
    _, state = story(recipe(nonfinite="skip"), [1.0, NAN, 3.0])
    assert (state.losses, state.updates) == ((1.0, 3.0), 2)
