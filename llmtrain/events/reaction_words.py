"""The sentences that tell a person of bad numbers."""

from __future__ import annotations

from llmtrain.events.reactions import (
    LASTING_FAULTS,
    CorruptionFound,
    FaultInjected,
    GradientAlarm,
    LayerPrecisionChanged,
    Rewound,
    SamplesSkipped,
    SpikeFound,
    StepRecomputed,
)
from llmtrain.events.schema import Payload
from llmtrain.events.words import Level

PARTS = {"weights": "compute weights", "master": "master weights"}


def reaction_sentence(payload: Payload) -> tuple[Level, str] | None:
    """Level and sentence, or None for other events and for routine (measurements, the loss scale)."""
    match payload:
        case StepRecomputed(step=step, reason="overflow"):
            return "info", f"step {step} overflowed and was computed again in FP32"
        case StepRecomputed(step=step, reason=reason) as again:
            return (
                "warning",
                f"step {step} was computed again in FP32: {reason}{_place(again.layer, again.rank)}",
            )
        case SamplesSkipped(step=step, first_sample=first, samples=count, reason=reason) as skipped:
            words = f"samples {first}..{first + count - 1} (up to step {step}) do not count: {reason}"
            return "warning", words + _place(skipped.layer, skipped.rank)
        case Rewound(step=step, to_step=to, source=source, reason=reason):
            return "warning", f"step {step}: weights go back to those of step {to} ({source}): {reason}"
        case SpikeFound(step=step, quantity=quantity, value=value, median=median, action=action):
            done = {"skip": ", update left out", "rewind": ", rewound"}.get(action, "")
            name = quantity.replace("grad_norm", "gradient norm")
            return "warning", f"step {step}: {name} {value:.4g} is a spike, usual is {median:.4g}{done}"
        case _:
            return _layer_sentence(payload)


def _layer_sentence(payload: Payload) -> tuple[Level, str] | None:
    match payload:
        case GradientAlarm(step=step, layer=layer, share=share):
            return "warning", f"step {step}: {share:.2%} of the gradient of {layer} does not fit the format"
        case LayerPrecisionChanged(step=step, layer=layer, precision=precision, reason=reason):
            return "info", f"{layer} computes in {precision} after step {step}: {reason}"
        case CorruptionFound(step=step, ranks=ranks, part=part, action=action):
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            what = f"{PARTS.get(part, 'weights')} of {who} are corrupt"
            if part not in PARTS:
                what = f"the weights of {who} differ, and nobody can say which are right"
            return "error", f"step {step}: {what} ({action})"
        case FaultInjected(step=step, fault=fault, rank=rank):
            when = f"from step {step} on" if fault in LASTING_FAULTS else f"in step {step}"
            return "warning", f"REHEARSAL: {fault} injected at rank {rank} {when}"
        case _:
            return None


def _place(layer: str, rank: int | None) -> str:
    where = f" in {layer}" if layer else ""
    return where + ("" if rank is None else f" on rank {rank}")
