"""Layers move to a wider format after repeated alarms, and return when they are quiet."""

from __future__ import annotations

from llmtrain.config.numerics import LayerPrecisionConfig
from llmtrain.engine.numerics.layer_precision import LayerRecord, observe, wide_layers

CONFIG = LayerPrecisionConfig(strikes=3, hold_steps=10)


def follow(
    alarms: dict[int, set[str]], steps: int, config: LayerPrecisionConfig = CONFIG
) -> dict[int, list[str]]:
    """Step -> layers that are wide after it, where that changes."""
    records: dict[str, LayerRecord] = {}
    found: dict[int, list[str]] = {}
    for step in range(1, steps + 1):
        records, changes = observe(records, config, step, alarms.get(step, set()))
        if changes:
            found[step] = list(wide_layers(records))
    return found


def test_the_third_alarm_widens_and_quiet_brings_back() -> None:
    alarms = {2: {"layers.1"}, 5: {"layers.1"}, 9: {"layers.1", "layers.2"}}
    assert follow(alarms, 40) == {9: ["layers.1"], 19: []}


def test_alarms_far_apart_are_no_repetition() -> None:
    assert follow({step: {"layers.0"} for step in (1, 13, 25, 37)}, 60) == {}


def test_an_alarm_while_wide_keeps_it_wide() -> None:
    alarms = {1: {"layers.0"}, 2: {"layers.0"}, 3: {"layers.0"}, 12: {"layers.0"}}
    assert follow(alarms, 40) == {3: ["layers.0"], 22: []}


def test_it_starts_anew_after_its_return() -> None:
    alarms = {step: {"layers.0"} for step in (1, 2, 3, 20, 21, 22)}
    assert follow(alarms, 50) == {3: ["layers.0"], 13: [], 22: ["layers.0"], 32: []}


def test_fixed_precision_changes_nothing() -> None:
    config = LayerPrecisionConfig(adaptive=False)
    assert follow({step: {"layers.0"} for step in range(1, 20)}, 20, config) == {}


def test_a_quiet_layer_is_forgotten() -> None:
    records, _ = observe({}, CONFIG, 1, {"layers.3"})
    assert list(records) == ["layers.3"]
    records, _ = observe(records, CONFIG, 11, set())
    assert records == {}
