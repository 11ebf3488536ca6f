"""The parts of a run's time: whatever its events say, they sum to the elapsed time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.events import schema
from llmtrain.events.event import Event
from llmtrain.events.records import AttemptState
from llmtrain.events.state import RunState, fold
from llmtrain.observe.goodput import Goodput, costs_by_cause, goodput
from llmtrain.observe.job_facts import JobFacts
from llmtrain.observe.run_reader import RunView
from llmtrain.run.layout import RunDir
from tests.support.sample_events import START, event, events, step_finished

seconds = st.floats(0, 1e5, allow_nan=False)
moment = st.none() | st.floats(START - 1e4, START + 1e5)


def view_of(state: RunState, now: float = START + 2e5) -> RunView:
    return RunView(run=RunDir(Path("/nowhere/run")), job=FACTS, state=state, holder=None, now=now)


FACTS = object.__new__(JobFacts)


@st.composite
def histories(draw: st.DrawFn) -> RunState:
    """Attempts with whatever times, sums and steps."""
    made = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        first = draw(st.none() | st.integers(1, 50))
        made.append(
            AttemptState(
                number=number,
                started=draw(moment),
                ended=draw(moment),
                outcome=draw(st.sampled_from(["", "completed", "stopped", "failed"])),
                rung=draw(st.sampled_from([0, 0, 4])),
                world_size=draw(st.integers(0, 64)),
                restored_step=draw(st.none() | st.integers(0, 60)),
                first_step=first,
                last_step=None if first is None else first + draw(st.integers(0, 50)),
                first_step_time=draw(moment),
                last_step_time=draw(moment),
                steps_seen=draw(st.integers(0, 80)),
                step_seconds=draw(seconds),
                evaluation_seconds=draw(seconds),
                checkpoint_seconds=draw(seconds),
                load_seconds=draw(seconds),
                found_time=draw(moment),
            )
        )
    return RunState(attempts=tuple(made), last_event=draw(moment))


def check(split: Goodput) -> None:
    assert sum(value for _, value in split.parts()) == pytest.approx(split.total, abs=1e-3)
    assert all(value >= -1e-6 for _, value in split.parts()), split
    assert split.ratio is None or 0.0 <= split.ratio <= 1.0
    assert 0.0 <= split.productive_gpu_hours <= split.gpu_hours + 1e-6


@settings(max_examples=200, deadline=None)
@given(histories())
def test_parts_sum_to_the_elapsed_time(state: RunState) -> None:
    check(goodput(view_of(state)))


@settings(max_examples=60, deadline=None)
@given(st.lists(events(), max_size=40))
def test_also_for_wild_events(wild: list[Event]) -> None:
    check(goodput(view_of(fold(wild))))


def story() -> list[Event]:
    """A run over five nodes that loses one, goes on with four and then with five again."""
    told: list[Event] = []

    def attempt(number: int, start: float, first: int, pace: float, rung: int, reason: str) -> float:
        begun = schema.AttemptStarted(world_size=rung or 5, nodes=("a",), reason=reason, rung=rung)
        told.append(event(begun, time=start, attempt=number))
        told.append(event(schema.PhaseStarted(phase="load"), time=start + 2, attempt=number, rank=0))
        restored = schema.Restored(step=first - 1, checkpoint=None)
        told.append(event(restored, time=start + 5, attempt=number, rank=0))
        for step in range(first, first + 10):
            end = start + 6 + (step - first + 1) * pace
            made = replace(step_finished(step), seconds=pace)
            told.append(event(made, time=end, attempt=number, rank=0))
        return start + 6 + 10 * pace

    end = attempt(1, START, 1, 1.0, 0, "first")
    told.append(event(schema.Found(finding="node_silent", message="n2"), time=end + 4, attempt=1))
    told.append(event(schema.AttemptEnded(outcome="failed", seconds=1), time=end + 6, attempt=1))
    end = attempt(2, end + 7, 8, 1.25, 4, "n2")
    told.append(event(schema.AttemptEnded(outcome="stopped", seconds=1), time=end, attempt=2))
    end = attempt(3, end + 1, 18, 1.0, 0, "back and fit: n2")
    told.append(event(schema.AttemptEnded(outcome="completed", seconds=1), time=end, attempt=3))
    told.append(event(schema.RunEnded(exit_status=0, message="done"), time=end, attempt=3))
    return told


def test_every_part_has_its_place() -> None:
    view = view_of(fold(story()))
    split = goodput(view)
    check(split)
    assert dict(split.parts()) == pytest.approx(
        {
            "productive": 7 + 10 + 10,
            "slow": 10 * 0.25,
            "lost": 3.0,
            "start": 3 * 3.0,
            "load": 3 * 3.0,
            "checkpoint": 0.0,
            "evaluation": 0.0,
            "detect": 4.0,
            "tear_down": 2.0,
            "down": 2.0,
            "other": 0.0,
        }
    )
    assert split.gpu_hours == pytest.approx((22 * 5 + 18.5 * 4 + 16 * 5) / 3600)
    assert costs_by_cause(view) == {
        "node_silent": pytest.approx(3 + 6 + 1 + 6),
        "step_up": pytest.approx(1 + 6),
    }
