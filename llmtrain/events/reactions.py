"""Events about bad numbers, written by rank 0: what was found, and what was done about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from llmtrain.events.schema import Payload
from llmtrain.events.words import (
    CorruptionAction,
    CorruptPart,
    SkipReason,
    SpikeAction,
    SpikeQuantity,
    Trouble,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecomputed(Payload):
    """A step was computed again, in FP32 and on the same data, and then used if its numbers were good."""

    kind: ClassVar[str] = "step_recomputed"
    step: int
    reason: Trouble
    loss: float
    """Loss of the second pass."""
    grad_norm: float
    layer: str = ""
    """Layer in which the first pass went wrong first; empty when that is not known."""
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesSkipped(Payload):
    """Samples whose step did not change the weights, or was taken back: consumed, but not trained on."""

    kind: ClassVar[str] = "samples_skipped"
    step: int
    """The step, or the last one of several."""
    first_sample: int
    samples: int
    reason: SkipReason
    layer: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound(Payload):
    """The weights went back to an earlier step; steps and data go on. `samples_skipped` tells which samples
    were lost."""

    kind: ClassVar[str] = "rewound"
    step: int
    to_step: int
    source: str
    """memory, the name of a checkpoint, or seed"""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaled(Payload):
    """The loss scale changes with the next step."""

    kind: ClassVar[str] = "loss_scaled"
    step: int
    scale: float
    overflows: int
    """Steps that overflowed so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeFound(Payload):
    """A value far above the recent ones."""

    kind: ClassVar[str] = "spike_found"
    step: int
    quantity: SpikeQuantity
    value: float
    median: float
    deviation: float
    """Robust standard deviation of the recent values."""
    action: SpikeAction


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsMeasured(Payload):
    """What the gradients of all layers look like, every few steps."""

    kind: ClassVar[str] = "gradients_measured"
    step: int
    layers: dict[str, Any] = field(default_factory=dict)
    """Layer -> [norm, largest magnitude, share above FP16's range, share below, share not finite]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAlarm(Payload):
    """Too large a share of a layer's gradient does not fit the number format."""

    kind: ClassVar[str] = "gradient_alarm"
    step: int
    layer: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrecisionChanged(Payload):
    """A layer computes in another format from the next step on."""

    kind: ClassVar[str] = "layer_precision_changed"
    step: int
    layer: str
    precision: str
    reason: str
    wide: bool
    """Whether it is the wider format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionFound(Payload):
    """Parameters that should be identical are not."""

    kind: ClassVar[str] = "corruption_found"
    step: int
    ranks: tuple[int, ...]
    """Ranks that are wrong; all that differ, when nobody can say."""
    part: CorruptPart
    action: CorruptionAction


LASTING_FAULTS = ("slow", "slow_disk", "full_disk")
"""Kinds that last for many steps, and are told once an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected(Payload):
    """A rehearsal: a fault was made on purpose, because the recipe says so."""

    kind: ClassVar[str] = "fault_injected"
    step: int
    """The first one of a fault that lasts."""
    fault: str
    rank: int
    layer: int
