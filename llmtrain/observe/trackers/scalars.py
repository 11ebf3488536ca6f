"""The numbers of one step under the names that experiment trackers show."""

from __future__ import annotations

from llmtrain.events.schema import StepFinished


def scalars(step: StepFinished) -> dict[str, float]:
    """Name -> value; MFU only where it is known."""
    values = {
        "training/loss": step.loss,
        "training/gradient_norm": step.grad_norm,
        "training/learning_rate": step.learning_rate,
        "speed/tokens_per_second": step.tokens_per_second,
        "speed/step_seconds": step.seconds,
    }
    if step.mfu is not None:
        values["speed/mfu"] = step.mfu
    return values
