"""What is told of a step's numbers. Pure: from the state before and after it to events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmtrain.config.recipe import Recipe
from llmtrain.engine.numerics.decide import Numbers, Ruling, Verdict
from llmtrain.engine.numerics.layer_precision import LayerChange
from llmtrain.engine.numerics.measure import LayerGradient
from llmtrain.engine.numerics.origin import Origin
from llmtrain.engine.numerics.state import NumericState
from llmtrain.events.reactions import (
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
from llmtrain.events.words import SpikeAction, Trouble


def tell_ruling(recipe: Recipe, seen: Numbers, ruling: Ruling, origin: Origin) -> Iterator[Payload]:
    """Spikes, and samples that do not count; those of a rewind are told with it."""
    for spike in ruling.spikes:
        yield SpikeFound(
            step=seen.step,
            quantity=spike.quantity,
            value=spike.value,
            median=spike.median,
            deviation=spike.deviation,
            action=_done_about(ruling.verdict),
        )
    if ruling.verdict is Verdict.SKIP and ruling.reason:
        yield SamplesSkipped(
            step=seen.step,
            first_sample=recipe.batch.samples_before(seen.step),
            samples=recipe.batch.at(seen.step),
            reason=ruling.reason,
            layer=origin.layer,
            rank=origin.rank,
        )


def _done_about(verdict: Verdict) -> SpikeAction:
    """What the verdict on a step means for a spike in it, whose numbers are finite."""
    if verdict is Verdict.SKIP:
        return "skip"
    return "rewind" if verdict is Verdict.REWIND else "apply"


def tell_rewind(
    recipe: Recipe, steps: tuple[int, int], source: str, reason: str, origin: Origin
) -> Iterator[Payload]:
    """Weights go back from the second step to the first, and the samples between them do not count."""
    to_step, step = steps
    yield Rewound(step=step, to_step=to_step, source=source, reason=reason)
    first = recipe.batch.samples_before(to_step + 1)
    yield SamplesSkipped(
        step=step,
        first_sample=first,
        samples=recipe.batch.samples_before(step + 1) - first,
        reason="rewound",
        layer=origin.layer,
        rank=origin.rank,
    )


def tell_recomputed(reason: Trouble, seen: Numbers, origin: Origin) -> StepRecomputed:
    """The second pass, and why there was one."""
    return StepRecomputed(
        step=seen.step,
        reason=reason,
        loss=seen.loss,
        grad_norm=seen.grad_norm,
        layer=origin.layer,
        rank=origin.rank,
    )


def tell_scale(step: int, before: NumericState, after: NumericState) -> Iterator[Payload]:
    """A new loss scale."""
    if after.loss_scale is not None and after.scale != before.scale:
        yield LossScaled(step=step, scale=after.scale, overflows=after.loss_scale.overflows)


def tell_gradients(
    step: int, measured: Sequence[LayerGradient], mode: str, alarm_share: float
) -> Iterator[Payload]:
    """What was measured, and the layers that are over the threshold."""
    if not measured:
        return
    yield GradientsMeasured(
        step=step,
        layers={one.layer: [one.norm, one.largest, one.above, one.below, one.nonfinite] for one in measured},
    )
    for one in measured:
        if one.abnormal(mode) > alarm_share:
            yield GradientAlarm(step=step, layer=one.layer, share=one.abnormal(mode))


def tell_layers(step: int, changes: Sequence[LayerChange], mode: str, fallback: str) -> Iterator[Payload]:
    """Layers that change their format."""
    for change in changes:
        yield LayerPrecisionChanged(
            step=step,
            layer=change.layer,
            precision=fallback if change.wide else mode,
            reason=change.reason,
            wide=change.wide,
        )
