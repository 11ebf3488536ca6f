"""How each failure of a rehearsal is made, and by which events its detection and cure are known."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmtrain.backends.rehearsed import return_node
from llmtrain.errors import ExitStatus
from llmtrain.events.event import Event
from llmtrain.events.schema import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    Decided,
    Found,
    Restored,
    RunEnded,
    StepFinished,
)
from llmtrain.events.watching import SlowRank
from llmtrain.run.record import read_record
from llmtrain.supervise.rehearsal.stage import RehearsalError, Stage

VICTIM = 1
"""Rank that the failure meets."""
SLOW_FROM = 30
"""Step from which the slow rank is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen, by the clock of the events, epoch seconds."""

    injected: float
    detected: float
    recovered: float | None
    """None where nothing has to recover."""
    what: str


MISSING: Mapping[type, str] = {
    Found: "nothing was found wrong",
    SlowRank: "no rank was named as slow; where others use the cores too, times may tell nothing of a rank",
    CheckpointFailed: "no save failed",
    CheckpointCommitted: "no checkpoint was committed afterwards",
    Restored: "no ranks went on afterwards",
    StepFinished: "no step was done afterwards",
    RunEnded: "the run did not end",
}
"""What it means that there is no event of a kind."""


# ---- reading the events
def first(events: Sequence[Event], kind: type, after: float = 0.0) -> Event:
    """The first event of a kind after a moment. Raises RehearsalError."""
    for event in events:
        if isinstance(event.payload, kind) and event.time > after:
            return event
    raise RehearsalError(MISSING[kind])


def trains_again(events: Sequence[Event], after: float) -> float:
    """When the first step of an attempt that began after a moment was done. Raises RehearsalError."""
    restored = first(events, Restored, after)
    return first(events, StepFinished, restored.time).time


def must_finish(stage: Stage) -> list[Event]:
    """All events of a run that did all steps. Raises RehearsalError for any other end."""
    code = stage.wait_for_end()
    events = stage.events()
    if code != ExitStatus.DONE:
        # Its record, since a run that never began has no events.
        raise RehearsalError(f"the run ended with exit code {code}: {read_record(stage.run).message}")
    return events


def _last_step(events: Sequence[Event], before: float = math.inf) -> float:
    """When the last step before a moment was done. Raises RehearsalError."""
    times = [each.time for each in events if isinstance(each.payload, StepFinished) and each.time < before]
    if not times:
        raise RehearsalError("it came before the first step was done")
    return max(times)


def _failure_of(stage: Stage, kind: str) -> Sight:
    """A failure that the recipe injects: it began when the step before it ended."""
    events = must_finish(stage)
    found = first(events, Found)
    assert isinstance(found.payload, Found)
    if found.payload.finding != kind or found.payload.rank != VICTIM:
        raise RehearsalError(f"it was taken for {found.payload.finding}: {found.payload.message}")
    return Sight(
        injected=_last_step(events, found.time),
        detected=found.time,
        recovered=trains_again(events, found.time),
        what=found.payload.message,
    )


# ---- the scenarios
def death(stage: Stage) -> Sight:
    """A rank is killed."""
    return _failure_of(stage, "rank_dead")


def hang(stage: Stage) -> Sight:
    """A rank stands still."""
    return _failure_of(stage, "hang")


def slow(stage: Stage) -> Sight:
    """Being slow is no failure: it is named, and the run goes on."""
    events = must_finish(stage)
    named = first(events, SlowRank)
    assert isinstance(named.payload, SlowRank)
    if named.payload.rank != VICTIM:
        raise RehearsalError(f"rank {named.payload.rank} was named instead of rank {VICTIM}")
    steps = {e.payload.step: e.time for e in events if isinstance(e.payload, StepFinished)}
    text = f"rank {VICTIM} on {named.payload.node} takes {100 * named.payload.excess:.0f} % longer: is named"
    return Sight(injected=steps[SLOW_FROM - 1], detected=named.time, recovered=None, what=text)


def full_disk(stage: Stage) -> Sight:
    """Saves fail for a while; one that is committed later is the cure."""
    events = must_finish(stage)
    failed = first(events, CheckpointFailed)
    assert isinstance(failed.payload, CheckpointFailed)
    begun = max(e.time for e in events if e.kind == "checkpoint_started" and e.time <= failed.time)
    saved = first(events, CheckpointCommitted, failed.time)
    return Sight(injected=begun, detected=failed.time, recovered=saved.time, what=failed.payload.error)


def corrupt_shard(stage: Stage) -> Sight:
    """The newest checkpoint is damaged while nobody reads it, and then needed."""
    stage.wait_for_checkpoint(12)
    damaged = stage.damage_newest_checkpoint()
    events = must_finish(stage)
    found = first(events, Found)
    restored = first(events, Restored, found.time)
    assert isinstance(restored.payload, Restored)
    if restored.payload.step >= damaged:
        raise RehearsalError(f"the damaged checkpoint of step {damaged} was not noticed")
    return Sight(
        injected=_last_step(events, found.time),
        detected=restored.time,
        recovered=trains_again(events, found.time),
        what=f"step {damaged} is damaged: went on from step {restored.payload.step}",
    )


def preemption(stage: Stage) -> Sight:
    """The run is told to leave, saves, and goes on: a scheduler queues its job again, else it is resumed."""
    stage.wait_for_step(10)
    asked = stage.preempt()
    code = stage.wait_for_end()
    if code != ExitStatus.RESUMABLE:
        raise RehearsalError(
            f"the preempted run ended with exit code {code}, not {int(ExitStatus.RESUMABLE)}"
        )
    left = first(stage.events(), RunEnded)
    how = stage.go_on()
    events = must_finish(stage)
    done = [e.payload.step for e in events if isinstance(e.payload, StepFinished)]
    if len(done) != len(set(done)):
        raise RehearsalError("steps were done twice, although there was time to save")
    again = trains_again(events, left.time)
    return Sight(injected=asked, detected=left.time, recovered=again, what=f"saved, left with 75, {how}")


def lost_node(stage: Stage) -> Sight:
    """A node is lost for good."""
    lost = _lose(stage)
    lost_at = _last_step(stage.events())
    events = _went_on(stage, lost)
    found, shapes = first(events, Found), _nodes_of_attempts(events)
    return Sight(
        injected=lost_at,
        detected=found.time,
        recovered=trains_again(events, found.time),
        what=f"{lost} is left out, {len(shapes[1])} nodes go on",
    )


def returned_node(stage: Stage) -> Sight:
    """A lost node comes back and is taken up."""
    lost = _lose(stage)
    stage.wait_for_step(11, attempt=2)
    return_node(stage.run, lost)
    back = time.time()
    events = _went_on(stage, lost)
    shapes = _nodes_of_attempts(events)
    up = [e for e in events if isinstance(e.payload, Decided) and "steps up" in e.payload.reason]
    if not up or lost not in shapes[-1]:
        raise RehearsalError(f"{lost} came back and was not taken up")
    return Sight(
        injected=back,
        detected=up[0].time,
        recovered=trains_again(events, up[0].time),
        what=f"{lost} is taken up again: {len(shapes[1])} -> {len(shapes[-1])} nodes",
    )


def _lose(stage: Stage) -> str:
    """Lose a node of a run that trains; its name."""
    stage.wait_for_step(10)
    return stage.lose_node()


def _went_on(stage: Stage, lost: str) -> list[Event]:
    """All events of a run that went on without a node. Raises RehearsalError."""
    events = must_finish(stage)
    shapes = _nodes_of_attempts(events)
    if len(shapes) < 2 or lost in shapes[1]:
        raise RehearsalError(f"{lost} was used again at once, or its loss not noticed")
    return events


def _nodes_of_attempts(events: Sequence[Event]) -> list[tuple[str, ...]]:
    return [tuple(e.payload.nodes) for e in events if isinstance(e.payload, AttemptStarted)]
