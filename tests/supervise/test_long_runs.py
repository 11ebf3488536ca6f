"""Runs that train for days without a failure: ranks in standby wait on, or are replaced by younger ones,
without a word; llmtrain is installed anew meanwhile."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.agent import kernel_log, messages
from llmtrain.backends.base import Node
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.events.records import AttemptState
from llmtrain.events.state import RunState
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.supervise.attempts import crew as crews
from llmtrain.supervise.attempts.crew import Crew
from llmtrain.supervise.attempts.standby import StandbyKeeper
from llmtrain.supervise.attempts.start_up import StartUp
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.detection.detect import detect
from llmtrain.supervise.detection.limits import Limits
from llmtrain.units import DAY
from tests.support import stand_in_runs as runs

LAYOUT = Layout(dp=2, micro_batch=1)
PLAN = AttemptPlan(number=1, layout=LAYOUT, nodes=(Node(name="n", address="::1"),), ranks_on_node=(2,))


class Agents:
    """A node's agent that says hello and answers with a port; the rest is said by the test."""

    said: queue.SimpleQueue[messages.Message]
    heard: list[messages.Message]

    def __init__(self, *_: object, **__: object) -> None:
        self.said, self.heard = queue.SimpleQueue(), []
        made.append(self)

    def open(self) -> dict[int, str]:
        self.said.put(messages.Hello(host="n", pid=1, version="0"))
        return {}

    def receive(self, timeout: float) -> Iterator[tuple[int, messages.Message]]:
        try:
            yield 0, self.said.get(timeout=timeout)
        except queue.Empty:
            return

    def send(self, node: int, message: messages.Message) -> None:
        self.heard.append(message)
        if isinstance(message, messages.PickPort):
            self.said.put(messages.Port(port=1))
        if isinstance(message, messages.Stop):
            self.said.put(messages.Gone(left=()))

    def send_all(self, message: messages.Message) -> None:
        self.send(0, message)

    def cut(self) -> None:
        pass


made: list[Agents] = []


@pytest.fixture(autouse=True)
def _agents(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(crews, "Fleet", Agents)


def crew_of(folder: Path, *, standby: bool = False) -> Crew:
    backend: Any = None
    return Crew(RunDir(folder), PLAN, backend, standby=standby)


def wrong_in(crew: Crew, seconds: float) -> Sequence[str]:
    """Kinds of what would be found later, while agents go on answering."""
    later = time.monotonic() + seconds
    crew.reports.nodes[0].heard = later
    return [finding.kind for finding in detect(crew.state, crew.reports, Limits(), later)]


def test_an_agent_of_another_version_is_told_of(tmp_path: Path) -> None:
    crew, notes = crew_of(tmp_path), list[str]()
    crew.note = notes.append
    assert StartUp(crew, Limits(), environment={}, is_stop_wanted=lambda: False).start() is None
    assert len(notes) == 1 and notes[0].startswith("agents are of llmtrain 0, this supervisor is of ")


def test_ranks_that_wait_may_say_nothing_for_days(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, standby=True)
    start_up = StartUp(crew, Limits(), environment={}, is_stop_wanted=lambda: False)
    assert start_up.start(standby=True) is None
    assert not wrong_in(crew, DAY)
    start_up.release()
    assert wrong_in(crew, DAY) == ["start_timeout"]


@pytest.mark.parametrize(("exit_code", "told"), [(0, 0), (1, 1)])
def test_ranks_that_have_waited_for_a_day_are_replaced_without_a_word(
    exit_code: int, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve("tiny", "local", ["faults.standby_after=0s"])
    session: Any = SimpleNamespace(
        run=RunDir(tmp_path),
        job=JobFile(run_id="r", version="0", spec=spec, layout=LAYOUT),
        backend=None,
        limits=Limits(),
        environment=dict,
    )
    training = crew_of(tmp_path)
    own = AttemptState(number=1, first_step=1, last_step=9, steps_seen=9, step_seconds=9.0)
    training.state, training.reports.started = RunState(attempts=(own,)), time.monotonic() - 9.0
    keeper, notes = StandbyKeeper(session), list[str]()

    def note(text: str, level: str) -> None:
        notes.append(text)

    keeper.look(training, note)
    runs.wait_for(lambda: len(made) == 2 and any(isinstance(each, messages.Start) for each in made[1].heard))
    made[1].said.put(messages.ScriptEnded(exit_code=exit_code, lines=()))
    runs.wait_for(lambda: any(isinstance(each, messages.Stop) for each in made[1].heard))
    later = time.monotonic() + DAY
    monkeypatch.setattr(time, "monotonic", lambda: later)
    keeper.look(training, note)
    keeper.look(training, note)
    assert len(made) == 3 and len(notes) == told, notes
    keeper.end()


def test_kernel_lines_are_new_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the kernel's log drifts from all others while a machine is up."""
    log = tmp_path / "kmsg"
    log.write_text("6,10,900000000,-;Out of memory: Killed process 7\n")
    monkeypatch.setattr(kernel_log, "LOG", log)
    word = kernel_log.KernelWord()
    assert not word.lines()
    log.write_text("6,11,5,-;Out of memory: Killed process 8\n")
    assert word.lines() == ("Out of memory: Killed process 8",)
