"""What can be rehearsed: how each failure is made, and by which events its detection and cure are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.backends.rehearsed import lose_node, return_node
from llmtrain.errors import ExitStatus
from llmtrain.events.event import Event
from llmtrain.events.schema import (
    CheckpointCommitted,
    CheckpointFailed,
    Decided,
    Found,
    Restored,
    RunEnded,
    StepFinished,
)
from llmtrain.events.watching import SlowRank
from llmtrain.supervise.rehearsal.stage import RehearsalError, Stage

VICTIM = 1
"""Rank that the failure meets."""
LOST = "n2"
"""Node that is lost."""

SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.sequence=64",
    "batch.global=12",
    "batch.micro=1",
    "data.validation_every=0",
    "learning_rate.warmup_steps=2",
    "checkpoint.every=0",
    "faults.standby=false",
)
"""Turns the recipe `tiny` into one whose steps take milliseconds."""
NODES = (
    "cluster.nodes=3",
    "cluster.gpus_per_node=1",
    "cluster.inter_node={data: {kind: tcp}, control: {kind: tcp}}",
    "faults.node_loss_budget=0.4",
    "cluster.failures.restart=0",
    "parallel.dp=3",
    "parallel.tp=1",
    "parallel.pp=1",
)
"""Three nodes of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen, by the clock of the events, epoch seconds."""

    injected: float
    detected: float
    recovered: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One failure. `act` makes it happen, waits for the end, and says what was seen."""

    name: str
    does: str
    overrides: Sequence[str]
    act: Callable[[Stage], Sight]
    is_of_nodes: bool = False
    """Whether nodes are lost; on one machine only, where they are stand-ins."""
    needs_local: bool = False
    """Whether files or processes of the ranks are touched."""


# ---- reading the events
def first(events: Sequence[Event], kind: type, after: float = 0.0) -> Event:
    """The first event of a kind after a moment. Raises RehearsalError."""
    for event in events:
        if isinstance(event.payload, kind) and event.time > after:
            return event
    raise RehearsalError(f"no {kind.__name__} was told")


def trains_again(events: Sequence[Event], after: float) -> float:
    """When the first step of an attempt that began after a moment was done. Raises RehearsalError."""
    restored = first(events, Restored, after)
    return first(events, StepFinished, restored.time).time


def must_finish(stage: Stage) -> list[Event]:
    """All events of a run that did all steps. Raises RehearsalError for any other end."""
    code = stage.wait_for_end()
    events = stage.events()
    if code != ExitStatus.DONE:
        raise RehearsalError(f"the run ended with exit code {code}: {_last_words(events)}")
    return events


def _last_words(events: Sequence[Event]) -> str:
    words = [event.payload.message for event in events if isinstance(event.payload, RunEnded)]
    return words[-1] if words else "without a word"


def _failure_of(stage: Stage, kind: str) -> Sight:
    """A failure that the recipe injects: it began when the step before it ended."""
    events = must_finish(stage)
    found = first(events, Found)
    assert isinstance(found.payload, Found)
    if found.payload.finding != kind or found.payload.rank != VICTIM:
        raise RehearsalError(f"it was taken for {found.payload.finding}: {found.payload.message}")
    steps = [
        each.time for each in events if isinstance(each.payload, StepFinished) and each.time < found.time
    ]
    return Sight(
        injected=max(steps),
        detected=found.time,
        recovered=trains_again(events, found.time),
        what=found.payload.message,
    )


# ---- the scenarios
def _death(stage: Stage) -> Sight:
    return _failure_of(stage, "rank_dead")


def _hang(stage: Stage) -> Sight:
    return _failure_of(stage, "hang")


def _slow(stage: Stage) -> Sight:
    """Being slow is no failure: it is named, and the run goes on."""
    events = must_finish(stage)
    named = first(events, SlowRank)
    assert isinstance(named.payload, SlowRank)
    if named.payload.rank != VICTIM:
        raise RehearsalError(f"rank {named.payload.rank} was named instead of rank {VICTIM}")
    steps = {e.payload.step: e.time for e in events if isinstance(e.payload, StepFinished)}
    text = f"rank {VICTIM} takes {100 * named.payload.excess:.0f} % longer"
    return Sight(injected=steps[SLOW_FROM - 1], detected=named.time, recovered=named.time, what=text)


def _full_disk(stage: Stage) -> Sight:
    events = must_finish(stage)
    failed = first(events, CheckpointFailed)
    assert isinstance(failed.payload, CheckpointFailed)
    begun = max(e.time for e in events if e.kind == "checkpoint_started" and e.time <= failed.time)
    saved = first(events, CheckpointCommitted, failed.time)
    return Sight(injected=begun, detected=failed.time, recovered=saved.time, what=failed.payload.error)


def _corrupt_shard(stage: Stage) -> Sight:
    """The newest checkpoint is damaged while nobody reads it, and then needed."""
    stage.wait_for_checkpoint(12)
    stage.wait_for_step(13)
    damaged = stage.damage_newest_checkpoint()
    killed = stage.kill_rank(VICTIM)
    events = must_finish(stage)
    restored = first(events, Restored, killed)
    assert isinstance(restored.payload, Restored)
    if restored.payload.step >= damaged:
        raise RehearsalError(f"the damaged checkpoint of step {damaged} was not noticed")
    return Sight(
        injected=killed,
        detected=restored.time,
        recovered=trains_again(events, killed),
        what=f"step {damaged} is damaged: went on from step {restored.payload.step}",
    )


def _preemption(stage: Stage) -> Sight:
    stage.wait_for_step(10)
    asked = stage.preempt()
    code = stage.wait_for_end()
    if code != ExitStatus.RESUMABLE:
        raise RehearsalError(
            f"the preempted run ended with exit code {code}, not {int(ExitStatus.RESUMABLE)}"
        )
    left = first(stage.events(), RunEnded)
    stage.resume()
    events = must_finish(stage)
    done = [e.payload.step for e in events if isinstance(e.payload, StepFinished)]
    if len(done) != len(set(done)):
        raise RehearsalError("steps were done twice, although there was time to save")
    again = trains_again(events, left.time)
    return Sight(injected=asked, detected=left.time, recovered=again, what="saved, left with 75, was resumed")


def _lost_node(stage: Stage) -> Sight:
    return _lose(stage, returns=False)


def _returned_node(stage: Stage) -> Sight:
    return _lose(stage, returns=True)


def _lose(stage: Stage, *, returns: bool) -> Sight:
    stage.wait_for_step(10)
    lose_node(stage.run, LOST, stage.place_of(LOST))
    steps = [e.time for e in stage.events() if isinstance(e.payload, StepFinished)]
    lost_at = max(steps)
    stage.wait_for_step(11, attempt=2)
    if returns:
        return_node(stage.run, LOST)
    events = must_finish(stage)
    found = first(events, Found)
    shapes = [e.payload.nodes for e in events if e.kind == "attempt_started"]  # type: ignore[attr-defined]
    if LOST in shapes[1]:
        raise RehearsalError(f"{LOST} was used again at once")
    if not returns:
        again, what = trains_again(events, found.time), f"{LOST} left out, {len(shapes[1])} nodes go on"
        return Sight(injected=lost_at, detected=found.time, recovered=again, what=what)
    up = [e for e in events if isinstance(e.payload, Decided) and "steps up" in e.payload.reason]
    if not up or LOST not in shapes[-1]:
        raise RehearsalError(f"{LOST} came back and was not taken up")
    back = first(events, Restored, found.time).time
    return Sight(
        injected=back,
        detected=up[0].time,
        recovered=trains_again(events, up[0].time),
        what=f"{LOST} taken up again: {len(shapes[1])} -> {len(shapes[-1])} nodes",
    )


SLOW_FROM = 30
TWO_REPLICAS = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1")
FOUR_REPLICAS = ("parallel.dp=4", "parallel.tp=1", "parallel.pp=1")
SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        name="death",
        does="a rank is killed",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=16",
            "checkpoint.every_steps=5",
            f"faults.inject=[{{kind: kill, step: 8, rank: {VICTIM}}}]",
        ),
        act=_death,
    ),
    Scenario(
        name="hang",
        does="a rank does nothing any more",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=32",
            "checkpoint.every_steps=5",
            f"faults.inject=[{{kind: hang, step: 26, rank: {VICTIM}}}]",
        ),
        act=_hang,
    ),
    Scenario(
        name="slow",
        does="a rank computes longer than the others",
        overrides=(
            *FOUR_REPLICAS,
            "train.steps=150",
            "checkpoint.every_steps=100",
            f"faults.inject=[{{kind: slow, step: {SLOW_FROM}, steps: 200, rank: {VICTIM}, seconds: 50ms}}]",
        ),
        act=_slow,
    ),
    Scenario(
        name="lost-node",
        does="a node is gone; the others go on",
        overrides=(*NODES, "train.steps=60", "checkpoint.every_steps=5"),
        act=_lost_node,
        is_of_nodes=True,
    ),
    Scenario(
        name="returned-node",
        does="a lost node comes back and is taken up",
        overrides=(
            *NODES,
            "train.steps=150",
            "checkpoint.every_steps=10",
            # Slow enough to be still at it when the node is back.
            "faults.inject=[{kind: slow, step: 20, steps: 60, seconds: 200ms}]",
        ),
        act=_returned_node,
        is_of_nodes=True,
    ),
    Scenario(
        name="full-disk",
        does="saves find no room for a while",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=30",
            "checkpoint.every_steps=5",
            f"faults.inject=[{{kind: full_disk, step: 8, steps: 10, rank: {VICTIM}}}]",
        ),
        act=_full_disk,
    ),
    Scenario(
        name="corrupt-shard",
        does="the newest checkpoint is damaged, and then needed",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=24",
            "checkpoint.every_steps=6",
            "faults.inject=[{kind: slow, step: 14, steps: 4, seconds: 2s}]",
        ),
        act=_corrupt_shard,
        needs_local=True,
    ),
    Scenario(
        name="preemption",
        does="the scheduler wants the nodes back; the run is resumed",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=40",
            "checkpoint.every_steps=100",
            "faults.inject=[{kind: slow, step: 11, steps: 3, seconds: 1s}]",
        ),
        act=_preemption,
        needs_local=True,
    ),
)
"""All scenarios, in the order of `all`."""
