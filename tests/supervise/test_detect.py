"""`detect` as a table: what was reported, and the finding that must come first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmtrain.agent import messages
from llmtrain.events import schema
from llmtrain.events.event import Event, encode_line
from llmtrain.events.state import RunState, apply
from llmtrain.supervise.detection.detect import describe_exit, detect
from llmtrain.supervise.detection.limits import (
    PHASE_SECONDS,
    Limits,
    limits_for,
    predicted_save_seconds,
    predicted_step_seconds,
)
from llmtrain.supervise.detection.reports import NodeReport, Reports

LIMITS = Limits()


@dataclass
class Story:
    """Builds reports and state as an attempt of 2 nodes x 2 ranks would."""

    reports: Reports = field(default_factory=lambda: Reports(attempt=1, world_size=4))
    state: RunState = field(default_factory=RunState)
    now: float = 100.0

    def __post_init__(self) -> None:
        for node in range(2):
            self.reports.nodes[node] = NodeReport(node=node, name=f"n{node}", opened=100.0, heard=100.0)

    def say(self, node: int, message: messages.Message | None) -> None:
        event = self.reports.observe(node, message, self.now)
        if event is not None:
            self.state = apply(self.state, event)

    def up(self) -> Story:
        """All agents up and all ranks in step 1."""
        for node in range(2):
            self.say(node, messages.Hello(host=f"h{node}", pid=1, version="0"))
        self.reports.started = self.now
        for rank in range(4):
            self.say(rank // 2, messages.RankSpawned(rank=rank, pid=1000 + rank))
            self.tell(rank, schema.PhaseStarted(phase="step", step=1))
        return self

    def tell(self, rank: int, payload: schema.Payload) -> None:
        event = Event(time=self.now, run="r", attempt=1, source="rank", rank=rank, seq=0, payload=payload)
        self.say(rank // 2, messages.Relayed(line=encode_line(event).decode().strip()))

    def end(self, rank: int, code: int | None, *, asked: bool = False, lines: tuple[str, ...] = ()) -> None:
        self.say(
            rank // 2,
            messages.RankEnded(rank=rank, pid=1000 + rank, exit_code=code, asked=asked, lines=lines),
        )

    def script(self, node: int, code: int) -> None:
        self.say(node, messages.ScriptEnded(exit_code=code))

    def ping_all(self) -> None:
        for node in range(2):
            self.say(node, messages.Alive(ranks=(), stage="running"))

    def kinds(self) -> list[str]:
        return [finding.kind for finding in detect(self.state, self.reports, LIMITS, self.now)]


def failed(error_class: str, step: int = 1) -> schema.RankFailed:
    return schema.RankFailed(error=f"Error: {error_class}", error_class=error_class, step=step)


def rank_killed(story: Story) -> None:
    story.end(3, -9, lines=("a", "b", "[W1201 01:17:12.106393944 socket.cpp:207] no name"))


def peers_fail_first_then_the_killed_one_is_seen(story: Story) -> None:
    story.tell(0, failed("communication"))
    story.end(0, 1)
    story.now += 0.3
    story.end(3, -9)


def user_code_after_communication(story: Story) -> None:
    story.tell(0, failed("communication"))
    story.now += 0.1
    story.tell(2, failed("user_code"))


def launcher_killed_takes_its_ranks_along(story: Story) -> None:
    story.script(1, -9)
    story.end(2, -9)
    story.end(3, -9)


def launcher_reports_a_failed_rank(story: Story) -> None:
    story.end(2, 1)
    story.script(1, 1)


def launcher_fails_before_any_rank(story: Story) -> None:
    story.script(0, 127)


def rank_finished_and_vanished(story: Story) -> None:
    story.tell(1, schema.RankFinished(reason="completed", step=9))
    story.end(1, None)
    story.now += 3.0
    story.ping_all()


def rank_vanished_a_moment_ago(story: Story) -> None:
    story.end(1, None)
    story.now += 1.0


def rank_vanished_and_its_peers_suffer(story: Story) -> None:
    story.tell(0, failed("communication"))
    story.end(1, None)


def rank_vanished(story: Story) -> None:
    story.end(1, None)
    story.now += 2.5
    story.ping_all()


def rank_left_as_asked(story: Story) -> None:
    story.end(1, -15, asked=True)


def rank_left_with_0(story: Story) -> None:
    story.end(1, 0)


def agent_killed(story: Story) -> None:
    story.say(1, None)


def agent_left_in_order(story: Story) -> None:
    story.say(1, messages.Gone())
    story.say(1, None)


def node_silent(story: Story) -> None:
    story.now += 9.0
    story.say(0, messages.Alive(ranks=(), stage="running"))
    story.now += 1.5


def node_quiet_but_not_too_long(story: Story) -> None:
    story.now += 9.9


def step_takes_long(story: Story) -> None:
    story.now += 299.0
    story.ping_all()


def step_hangs(story: Story) -> None:
    story.now += 301.0
    story.ping_all()


def checkpoint_takes_longer_than_a_step_may(story: Story) -> None:
    for rank in range(4):
        story.tell(rank, schema.PhaseStarted(phase="checkpoint", step=1))
    story.now += 1700.0
    story.ping_all()


def checkpoint_hangs(story: Story) -> None:
    story.tell(0, schema.PhaseStarted(phase="checkpoint", step=1))
    story.now += 1801.0
    story.ping_all()


def supervisor_was_suspended(story: Story) -> None:
    story.now += 3600.0
    story.reports.forgive(3600.0)


def rank_of_an_older_attempt_speaks(story: Story) -> None:
    event = Event(time=1.0, run="r", attempt=0, source="rank", rank=0, seq=0, payload=failed("user_code"))
    story.say(0, messages.Relayed(line=encode_line(event).decode()))


def garbage_from_an_agent(story: Story) -> None:
    story.say(0, messages.Relayed(line="{ not json"))


@pytest.mark.parametrize(
    ("happening", "expected"),
    [
        (rank_killed, "rank_dead"),
        (peers_fail_first_then_the_killed_one_is_seen, "rank_dead"),
        (user_code_after_communication, "rank_failed"),
        (launcher_killed_takes_its_ranks_along, "launcher_failed"),
        (launcher_reports_a_failed_rank, "rank_dead"),
        (launcher_fails_before_any_rank, "launcher_failed"),
        (rank_finished_and_vanished, None),
        (rank_vanished_a_moment_ago, None),
        (rank_vanished, "rank_dead"),
        (rank_vanished_and_its_peers_suffer, "rank_dead"),
        (rank_left_as_asked, None),
        (rank_left_with_0, None),
        (agent_killed, "agent_lost"),
        (agent_left_in_order, None),
        (node_silent, "node_silent"),
        (node_quiet_but_not_too_long, None),
        (step_takes_long, None),
        (step_hangs, "hang"),
        (checkpoint_takes_longer_than_a_step_may, None),
        (checkpoint_hangs, "hang"),
        (supervisor_was_suspended, None),
        (rank_of_an_older_attempt_speaks, None),
        (garbage_from_an_agent, None),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_first_finding(happening: Callable[[Story], None], expected: str | None) -> None:
    story = Story().up()
    assert story.kinds() == []
    happening(story)
    assert (story.kinds() or [None])[0] == expected


def test_cause_names_rank_host_signal_and_last_words() -> None:
    story = Story().up()
    rank_killed(story)
    [finding] = detect(story.state, story.reports, LIMITS, story.now)
    assert finding.message == "rank 3 on n1 was killed by SIGKILL (exit code 137); its last words: b"
    assert (finding.rank, finding.node) == (3, 1)


def test_user_code_error_carries_class_and_step() -> None:
    story = Story().up()
    user_code_after_communication(story)
    finding = detect(story.state, story.reports, LIMITS, story.now)[0]
    assert (finding.rank, finding.error_class, finding.step) == (2, "user_code", 1)


def test_agents_that_never_speak() -> None:
    story = Story()
    story.say(0, messages.Hello(host="h0", pid=1, version="0"))
    story.now += LIMITS.agents_up + 0.1
    story.say(0, messages.Alive(ranks=(), stage="idle"))
    [finding] = detect(story.state, story.reports, LIMITS, story.now)
    assert (finding.kind, finding.node) == ("start_timeout", 1)


def test_ranks_that_never_speak() -> None:
    story = Story()
    for node in range(2):
        story.say(node, messages.Hello(host="h", pid=1, version="0"))
    story.reports.started = story.now
    story.now += LIMITS.ranks_up + 1
    story.ping_all()
    assert story.kinds() == ["start_timeout"]


def test_a_predicted_long_save_widens_what_reads_and_writes_checkpoints(tmp_path: Path) -> None:
    (plan := tmp_path / "plan.json").write_text('{"reliability": {"checkpoint_seconds": 5000.0}}')
    assert (predicted_save_seconds(plan), predicted_step_seconds(plan)) == (5000.0, 0.0)
    limits = limits_for(1.0, save_seconds=5000.0)
    widened = {phase for phase in PHASE_SECONDS if limits.phase(phase) == 50_000.0}
    assert widened == {"load", "checkpoint", "finish"}
    assert all(limits.phase(each) == PHASE_SECONDS[each] for each in PHASE_SECONDS.keys() - widened)
    assert limits_for(1.0, save_seconds=10.0) == limits_for(1.0)
    assert predicted_save_seconds(tmp_path / "none.json") == 0.0


def test_a_predicted_long_step_widens_its_limit_only() -> None:
    limits = limits_for(60.0)
    assert limits.phase("step") == 1200.0
    assert limits.phase("checkpoint") == LIMITS.phase("checkpoint")
    assert limits_for(0.1).phase("step") == LIMITS.phase("step")
    assert limits.phase("a phase of a newer version") == max(limits.phases.values())


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "left with exit code 1"),
        (-9, "was killed by SIGKILL (exit code 137)"),
        (-15, "was killed by SIGTERM (exit code 143)"),
        (-100, "was killed by signal 100 (exit code 228)"),
    ],
)
def test_describe_exit(code: int, text: str) -> None:
    assert describe_exit(code) == text
