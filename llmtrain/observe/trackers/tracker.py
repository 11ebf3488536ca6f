"""A run's events as the points of an experiment tracker: every step once, over all attempts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llmtrain.events.event import Event
from llmtrain.events.schema import Evaluated, StepFinished
from llmtrain.observe.trackers.scalars import scalars


@dataclass(frozen=True, slots=True)
class Row:
    """Values at one step."""

    step: int
    values: dict[str, float]


def rows(events: Iterable[Event], after: int) -> Iterator[Row]:
    """Rows of the steps beyond `after`, ascending, each once.

    A tracker takes nothing back. Steps that an attempt does again after a restart were told already, and
    come out the same, because data and weights are the same: they are left out. A validation is told with
    the step that it follows, by itself when that was told before.
    """
    pending: Row | None = None
    for event in events:
        match event.payload:
            case StepFinished() as step if step.step > max(after, 0 if pending is None else pending.step):
                if pending is not None:
                    yield pending
                pending = Row(step.step, _values(step))
            case Evaluated(step=number, loss=loss) if pending is not None and number == pending.step:
                pending.values["validation/loss"] = loss
            case Evaluated(step=number, loss=loss) if pending is None and number == after:
                yield Row(number, {"validation/loss": loss})
    if pending is not None:
        yield pending


def _values(step: StepFinished) -> dict[str, float]:
    """Names as in TensorBoard; tokens are those that the weights have seen."""
    values = scalars(step)
    if step.samples:
        values["tokens"] = float((step.first_sample + step.samples) * step.tokens // step.samples)
    return values
