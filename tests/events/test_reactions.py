"""Reactions to bad numbers: the fold, the sentences, the line of `status`."""

from __future__ import annotations

import itertools

import pytest

from llmtrain.events.event import decode_line, encode_line
from llmtrain.events.moments import describe
from llmtrain.events.reactions import (
    CorruptionFound,
    FaultInjected,
    GradientAlarm,
    GradientsMeasured,
    LayerPrecisionChanged,
    LossScaled,
    Rewound,
    SamplesSkipped,
    SpikeFound,
    StepRecomputed,
)
from llmtrain.events.schema import Payload
from llmtrain.events.state import fold
from llmtrain.observe.reactions import reactions_document, reactions_text
from tests.support.sample_events import event


def changed(step: int, wide: bool) -> LayerPrecisionChanged:
    precision = "fp32" if wide else "bf16"
    return LayerPrecisionChanged(
        step=step, layer="layers.3", precision=precision, reason="3 alarms", wide=wide
    )


SKIPPED = SamplesSkipped(step=7, first_sample=96, samples=16, reason="nonfinite", layer="layers.2", rank=5)
TOLD: tuple[tuple[Payload, str], ...] = (
    (
        StepRecomputed(step=7, reason="nonfinite", loss=2.0, grad_norm=0.5, layer="layers.2", rank=5),
        "step 7 was computed again in FP32: nonfinite in layers.2 on rank 5",
    ),
    (SKIPPED, "samples 96..111 (up to step 7) do not count: nonfinite in layers.2 on rank 5"),
    (
        Rewound(step=9, to_step=6, source="memory", reason="spike"),
        "step 9: weights go back to those of step 6 (memory): spike",
    ),
    (
        SpikeFound(step=4, quantity="grad_norm", value=9.0, median=1.0, deviation=0.1, action="skip"),
        "step 4: gradient norm 9 is a spike, usual is 1, update left out",
    ),
    (
        GradientAlarm(step=4, layer="layers.0", share=0.25),
        "step 4: 25.00% of the gradient of layers.0 does not fit the format",
    ),
    (changed(8, True), "layers.3 computes in fp32 after step 8: 3 alarms"),
    (
        CorruptionFound(step=3, ranks=(6,), part="weights", action="recompute"),
        "step 3: compute weights of rank 6 are corrupt (recompute)",
    ),
    (
        CorruptionFound(step=3, ranks=(0, 1), part="unknown", action="stop"),
        "step 3: the weights of ranks 0, 1 differ, and nobody can say which are right (stop)",
    ),
    (
        FaultInjected(step=5, fault="nan", rank=3, layer=1),
        "REHEARSAL: nan injected at rank 3 in step 5",
    ),
    (
        FaultInjected(step=5, fault="slow", rank=3, layer=0),
        "REHEARSAL: slow injected at rank 3 from step 5 on",
    ),
)


@pytest.mark.parametrize(("payload", "sentence"), TOLD, ids=lambda value: getattr(value, "kind", ""))
def test_sentences(payload: Payload, sentence: str) -> None:
    moment = describe(event(payload, rank=0))
    assert moment is not None
    assert moment.text == sentence


def test_routine_is_not_told() -> None:
    for payload in (
        LossScaled(step=5, scale=8.0, overflows=2),
        GradientsMeasured(step=25, layers={"head": [1.0]}),
    ):
        assert describe(event(payload, rank=0)) is None
        assert decode_line(encode_line(event(payload, rank=0))) == event(payload, rank=0)


def test_the_fold_counts_and_knows_what_holds_now() -> None:
    state = fold(event(payload, rank=0, time=100.0 + at) for at, (payload, _) in enumerate(TOLD))
    assert reactions_document(state.reactions) == {
        "recomputed": 1,
        "skipped": 1,
        "skipped_samples": 16,
        "rewound": 1,
        "spikes": 1,
        "alarms": 1,
        "corruptions": 2,
        "injected": 2,
        "loss_scale": None,
        "overflows": 0,
        "wide_layers": {"layers.3": "fp32"},
    }
    assert reactions_text(state.reactions) == (
        "REHEARSAL: 2 faults injected   1 step recomputed in FP32   16 samples skipped   1 rewind   "
        "1 spike   1 gradient alarm   2 corruptions   layers.3 in fp32"
    )
    assert reactions_text(fold([]).reactions) == ""


def test_what_a_rewind_covers_counts_once() -> None:
    skips = [
        SamplesSkipped(step=step, first_sample=16 * (step - 1), samples=16, reason="nonfinite")
        for step in (5, 6, 9)
    ]
    rewound = SamplesSkipped(step=6, first_sample=48, samples=48, reason="rewound")
    for order in itertools.permutations([*skips, rewound]):
        state = fold(event(payload, rank=0) for payload in order)
        assert state.reactions.skipped_samples == 48 + 16


def test_the_order_of_files_does_not_matter() -> None:
    events = [
        event(LossScaled(step=5, scale=8.0, overflows=2), rank=0, attempt=1),
        event(LossScaled(step=3, scale=64.0, overflows=1), rank=0, attempt=2),
        event(changed(5, True), rank=0, attempt=1),
        event(changed(9, False), rank=0, attempt=1),
    ]
    found = {reactions_text(fold(order).reactions) for order in itertools.permutations(events)}
    assert found == {"loss scale 64"}
