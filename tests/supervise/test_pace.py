"""Limits of silence: generous at first, then as tight as measured times allow; slow things raise no alarm."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from llmtrain.agent import messages
from llmtrain.events import schema
from llmtrain.events.event import Event, encode_line
from llmtrain.events.state import RunState, apply
from llmtrain.supervise.detection.detect import Finding, detect
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.detection.pace import MEASURED_STEPS, STEP_FLOOR, STEPS_BEFORE, Pace
from llmtrain.supervise.detection.reports import NodeReport, Reports

LIMITS = Limits()


@dataclass
class Clockwork:
    """One node of two ranks whose agent pings back every second."""

    reports: Reports = field(default_factory=lambda: Reports(attempt=1, world_size=2))
    state: RunState = field(default_factory=RunState)
    now: float = 0.0
    quiet: float | None = None
    alarms: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reports.nodes[0] = NodeReport(node=0, name="n0", opened=0.0, heard=0.0)
        self.hear(messages.Hello(host="h", pid=1, version="0"))
        self.reports.started = 0.0

    def hear(self, message: messages.Message) -> None:
        event = self.reports.observe(0, message, self.now)
        if event is not None:
            self.state = apply(self.state, event)

    def tell(self, payload: schema.Payload, rank: int = 0) -> None:
        event = Event(time=self.now, run="r", attempt=1, source="rank", rank=rank, seq=0, payload=payload)
        self.hear(messages.Relayed(line=encode_line(event).decode().strip()))

    def phase(self, phase: str, step: int = 1) -> None:
        for rank in range(2):
            self.tell(schema.PhaseStarted(phase=phase, step=step), rank)

    def wait(self, seconds: float, *, moving: bool = False) -> None:
        """Time passes; with `moving` ranks are seen to do something."""
        end = self.now + seconds
        self.quiet = self.quiet or 0.0
        while self.now < end:
            self.now += 1.0
            self.quiet = 0.0 if moving else self.quiet + 1.0
            self.hear(messages.Alive(ranks=(0, 1), stage="running", quiet=self.quiet))
            self.alarms += [
                each for each in detect(self.state, self.reports, LIMITS, self.now) if each.kind == "hang"
            ]

    def step(self, number: int, seconds: float) -> None:
        self.wait(seconds, moving=True)
        self.tell(
            schema.StepFinished(
                step=number,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=0.1,
                seconds=seconds,
                tokens=1,
                tokens_per_second=1.0,
            )
        )

    def trained(self, seconds: float = 2.0, steps: int = 3 * STEPS_BEFORE) -> Clockwork:
        self.phase("step")
        for number in range(1, steps + 1):
            self.step(number, seconds)
        return self


@pytest.mark.parametrize(("seconds", "limit"), [(0.1, STEP_FLOOR), (2.0, STEP_FLOOR), (30.0, 90.0)])
def test_hang_is_found_within_three_slow_steps_or_ten_seconds(seconds: float, limit: float) -> None:
    clockwork = Clockwork().trained(seconds)
    assert not clockwork.alarms
    since = clockwork.now
    clockwork.wait(limit + 3.0)
    assert clockwork.alarms[0].at - since <= max(10.0, 3.0 * seconds + 1.0)
    assert clockwork.alarms[0].limit == pytest.approx(limit)


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate", "load", "build", "finish"])
def test_slow_phases_raise_no_alarm(phase: str) -> None:
    """Ten times a phase's slowest time, or minutes when it is the first."""
    clockwork = Clockwork().trained()
    clockwork.phase(phase)
    clockwork.wait(250.0)
    clockwork.phase("step")
    clockwork.wait(1.0)
    assert not clockwork.alarms


def test_checkpoint_slower_than_ever_raises_no_alarm_while_it_writes() -> None:
    clockwork = Clockwork().trained()
    for _ in range(3):
        clockwork.phase("checkpoint")
        clockwork.wait(5.0)
        clockwork.tell(schema.CheckpointCommitted(step=1, name="s", bytes=1, seconds=5.0))
        clockwork.phase("step")
    clockwork.phase("checkpoint")
    clockwork.wait(900.0, moving=True)
    assert not clockwork.alarms
    clockwork.wait(181.0)
    assert clockwork.alarms, "nothing moves any more"


def test_first_steps_may_compile() -> None:
    clockwork = Clockwork()
    clockwork.phase("step")
    clockwork.wait(200.0)
    clockwork.trained(0.5, steps=STEPS_BEFORE - 1)
    clockwork.wait(200.0)
    assert not clockwork.alarms


def test_a_slow_step_in_which_ranks_move_raises_no_alarm_until_the_generous_limit() -> None:
    clockwork = Clockwork().trained(1.0)
    clockwork.wait(LIMITS.phase("step") - 2.0, moving=True)
    assert not clockwork.alarms
    clockwork.wait(5.0, moving=True)
    assert clockwork.alarms, "it moves for ever and finishes nothing"


def test_limits_of_a_run_survive_a_restart_but_for_the_steps() -> None:
    pace = Clockwork().trained().reports.pace
    pace.slowest["load"] = 60.0
    again = pace.for_next_attempt()
    assert again.limit("step", 300.0) == 300.0
    assert again.limit("load", 1800.0) == 600.0
    assert again.limit("load", 400.0) == 400.0, "never more than the generous limit"
    # A first load that read nothing tells little of one that takes the storage an hour.
    pace.slowest["load"] = 0.1
    assert pace.limit("load", LIMITS.phase("load")) == 300.0
    assert pace.limit("load", 20 * LIMITS.phase("load")) == 6000.0


def test_pace_forgets_old_steps_and_odd_numbers() -> None:
    pace = Pace()
    for seconds in [100.0] * 5 + [float("nan")] + [1.0] * MEASURED_STEPS:
        pace.observe(
            Event(
                time=0.0,
                run="r",
                attempt=1,
                source="rank",
                rank=0,
                seq=0,
                payload=schema.StepFinished(
                    step=1,
                    loss=1.0,
                    grad_norm=1.0,
                    learning_rate=1.0,
                    seconds=seconds,
                    tokens=1,
                    tokens_per_second=1.0,
                ),
            )
        )
    assert pace.slow_step() == 1.0
    assert Pace().slow_step() == 0.0
