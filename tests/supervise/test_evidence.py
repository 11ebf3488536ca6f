"""Who holds the others up: as a table over what agents see of their ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from llmtrain.agent.pulse import Pulse
from llmtrain.agent.ranks import RankProcess
from llmtrain.run.flight import FlightView, LaneView
from llmtrain.supervise.attempts.inquiry import judge
from llmtrain.supervise.detection.detect import Finding
from llmtrain.supervise.detection.evidence import RankEvidence, blame, collective_table, parse_evidence
from llmtrain.supervise.explanation.stacks import group_stacks, main_stack


def lane(
    axis: str, group: int, entered: int, *, finished: int | None = None, waits: bool = False
) -> LaneView:
    done = entered if finished is None else finished
    return LaneView(
        axis=axis, group=group, operation="all_reduce", entered=entered, finished=done, waits=waits, at=1.0
    )


def seen(rank: int, doing: str, *lanes: LaneView, state: str = "S", step: int = 7) -> RankEvidence:
    flight = FlightView(step=step, doing=doing, since=1.0, lanes=lanes)
    return RankEvidence(rank=rank, pid=100 + rank, state=state, flight=flight)


def waiting(rank: int, number: int, *, axis: str = "world", group: int = 1) -> RankEvidence:
    return seen(rank, "agree", lane(axis, group, number, finished=number - 1, waits=True))


CASES = {
    "one never came": (
        [waiting(0, 9), waiting(1, 9), seen(2, "fetch", lane("world", 1, 8)), waiting(3, 9)],
        (2,),
        "rank 2 is at `fetch` of step 7; 3 ranks entered all_reduce 9 of group world, rank 2 did not",
    ),
    "one is stopped in the middle of a collective that is under way": (
        [waiting(0, 9), seen(1, "backward", lane("world", 1, 9, finished=8), state="T")],
        (1,),
        "rank 1 is stopped by a signal or a debugger",
    ),
    "a chain: 3 waits for 2, 2 waits for 1": (
        [
            seen(1, "forward of micro-batch 3, stage 0", lane("tp", 5, 40)),
            seen(2, "agree", lane("tp", 5, 41, finished=40, waits=True), lane("dp", 6, 3)),
            seen(3, "agree", lane("dp", 6, 4, finished=3, waits=True)),
        ],
        (1,),
        "rank 1 is at `forward of micro-batch 3, stage 0` of step 7",
    ),
    "in a pipeline, nobody is late in a collective": (
        [seen(0, ""), seen(1, "backward of micro-batch 1, stage 1"), seen(2, "")],
        (1,),
        "rank 1 is at `backward of micro-batch 1, stage 1`",
    ),
    "storage": (
        [waiting(0, 9), seen(1, "checkpoint", lane("world", 1, 8), state="D")],
        (1,),
        "rank 1 is in uninterruptible sleep",
    ),
    "two are late": (
        [waiting(0, 9), seen(1, "fetch", lane("world", 1, 8)), seen(2, "fetch", lane("world", 1, 8))],
        (1, 2),
        "ranks 1 and 2 are at `fetch` of step 7; rank 0 entered all_reduce 9 of group world, ranks 1 and 2",
    ),
    "they wait for each other": (
        [
            seen(0, "agree", lane("tp", 1, 5, finished=4, waits=True), lane("dp", 2, 3)),
            seen(1, "agree", lane("tp", 1, 4), lane("dp", 2, 4, finished=3, waits=True)),
        ],
        (0, 1),
        "ranks 0 and 1 are waiting for others, too",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blame(name: str) -> None:
    evidence, ranks, words = CASES[name]
    found = blame(evidence)
    assert found is not None
    assert (found.ranks, found.is_busy) == (ranks, name == "storage")
    assert words in found.reason


def test_a_rank_that_computes_may_only_be_slow() -> None:
    found = blame([waiting(0, 9), seen(1, "fetch", lane("world", 1, 8), state="R")])
    assert found is not None and found.is_busy


def hang(silent: float) -> Finding:
    message = "no rank has finished anything for 10 s; furthest behind: rank 0, in phase `step` of step 7"
    return Finding(kind="hang", message=message, at=1.0, rank=0, silent=silent, limit=10.0)


@pytest.mark.parametrize(
    ("evidence", "silent", "rank"),
    [
        ([waiting(0, 9), seen(1, "fetch", lane("world", 1, 8))], 11.0, 1),
        ([waiting(0, 9), seen(1, "fetch", lane("world", 1, 8), state="R")], 11.0, None),
        ([waiting(0, 9), seen(1, "fetch", lane("world", 1, 8), state="R")], 41.0, 1),
        ([waiting(0, 9), seen(1, "checkpoint", lane("world", 1, 8), state="D")], 11.0, None),
        ([seen(0, "update"), seen(1, "update")], 11.0, None),
        ([seen(0, "update"), seen(1, "update")], 41.0, 0),
        ([], 11.0, 0),
    ],
    ids=["absent", "busy", "busy too long", "storage", "all at work", "all at work too long", "unseen"],
)
def test_when_a_silence_is_a_hang(evidence: list[RankEvidence], silent: float, rank: int | None) -> None:
    found = judge(hang(silent), evidence, {0: 0, 1: 5})
    assert (found and found.rank) == rank
    if found is not None and evidence and rank == 1:
        assert found.node == 5 and found.message.startswith(
            "no rank has finished anything for 10 s; rank 1 is "
        )


def test_no_evidence_no_blame() -> None:
    assert blame([]) is None
    assert blame([RankEvidence(rank=0, pid=1, state="S"), RankEvidence(rank=1, pid=2, state="S")]) is None
    assert blame([seen(0, "fetch"), seen(1, "fetch")]) is None, "all are free: none is different"


def test_table_names_who_is_missing() -> None:
    evidence, _, _ = CASES["one never came"]
    assert list(collective_table(evidence)) == [
        "world: all_reduce 9: entered by ranks 0, 1 and 3, not by rank 2"
    ]


def test_evidence_of_another_version_is_left_out() -> None:
    raw = asdict(seen(3, "fetch", lane("world", 1, 8)))
    assert parse_evidence(raw) == seen(3, "fetch", lane("world", 1, 8))
    assert parse_evidence({"rank": 1}) is None
    assert parse_evidence({**raw, "flight": {"novel": 1}}) is None


RANK = """
import os, signal, sys
from llmtrain.engine.flight import flight
flight.open()
lane = flight.lane("dp", (0, 1))
flight.begin_step(12)
lane.enter("all_reduce")
lane.wait()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_process_and_a_dead_one_can_still_be_read() -> None:
    """By another process, without any help of the rank's."""
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
        pulse = Pulse()
        pulse.add([RankProcess(rank=1, pid=rank.pid, pidfd=None)])
        deadline = time.monotonic() + 20.0
        while parse_evidence(pulse.evidence(time.monotonic())[0]).state != "T":  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert pulse.quiet(100.0) == 0.0
        assert pulse.quiet(107.0) == 7.0
        rank.kill()
        rank.wait()
        found = parse_evidence(pulse.evidence(time.monotonic())[0])
        assert found is not None and found.flight is not None
        assert (found.rank, found.state, found.flight.step, found.flight.doing) == (1, "", 12, "fetch")
        [only] = found.flight.lanes
        assert (only.axis, only.operation, only.entered, only.finished) == ("dp", "all_reduce", 1, 0)
        assert only.waits and found.waits
    finally:
        rank.kill()
        rank.wait()


DUMP = """\
Thread 0x00007efdd9c3e6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007efddaa83b80 (most recent call first):
  File "/x/llmtrain/engine/parallel/groups.py", line 52 in wait
  File "/x/llmtrain/engine/step.py", line 80 in train_step
"""


def test_stacks_are_those_of_the_main_thread_of_the_newest_dump() -> None:
    frames = ("parallel/groups.py:52 wait", "engine/step.py:80 train_step")
    assert main_stack("Current thread 0x1 (most recent call first):\n" + DUMP) == frames
    assert main_stack("") == ()


def test_equal_stacks_are_one_group_and_the_odd_one_comes_first() -> None:
    groups = group_stacks({0: ("a",), 1: ("b",), 2: ("a",), 3: ()})
    assert [(group.ranks, group.frames) for group in groups] == [((1,), ("b",)), ((0, 2), ("a",))]
