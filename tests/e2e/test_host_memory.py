"""The machine's memory runs out: the kernel kills a real rank, which leaves no word, and the post-mortem says
why it died."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.agent.kernel_log import KernelWord
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import launches
from tests.support import stand_in_runs as runs
from tests.support.memory_groups import MemoryGroup, memory_group

VICTIM = 2
EVIDENCE = re.compile(r"Killed process \d+|the control group counts 1 kills for memory")


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(f"llmtrain-{os.getpid()}") as group:
        yield group


def in_group(group: MemoryGroup) -> subprocess.Popen[bytes]:
    """A process that holds memory which counts for the group."""
    code = "import sys, time; sys.stdin.read(1); held = b'x' * (32 << 20); print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    group.add(process.pid)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"!")
    process.stdin.close()
    process.stdout.read(1)
    return process


@pytest.mark.e2e
def test_rank_killed_for_memory_is_told_so_and_the_run_goes_on(
    run: RunDir, group: MemoryGroup, tmp_path: Path
) -> None:
    slow = "faults.inject=[{kind: slow, step: 5, steps: 40, seconds: 100ms}]"
    command = launches.launch(run, *launches.FOUR_RANKS, "train.steps=50", slow, home=tmp_path)
    group.add(command.pid)
    runs.wait_for(lambda: runs.step_reached(run, 4), 240, "steps")
    group.exhaust(runs.rank_pid(run, VICTIM))
    launches.end(command, 0)
    [found] = runs.events(run, "found")
    assert (found.payload.finding, found.payload.rank) == ("rank_dead", VICTIM)
    told = json.loads(run.attempt(1).post_mortem_json.read_text())
    assert (told["cause"], told["rank"]) == ("host_memory", VICTIM)
    assert EVIDENCE.search(told["evidence"]), told["evidence"]
    verdict = run.attempt(1).post_mortem_text.read_text().splitlines()[0]
    assert verdict.startswith("Attempt 1 ended because the machine's memory ran out: rank 2 on ")
    assert [attempt.outcome for attempt in read_record(run).attempts] == ["failed", "completed"]
    runs.assert_nothing_left(run)


def test_kills_are_counted_in_the_groups_of_ranks_and_from_the_start_on(group: MemoryGroup) -> None:
    """A scheduler may put ranks, but not the agent, into a group."""
    word = KernelWord()
    for kills in (1, 2):
        rank = in_group(group)
        word.watch(rank.pid)
        later = KernelWord()
        later.watch(rank.pid)
        group.exhaust(rank.pid)
        assert rank.wait(30) == -signal.SIGKILL
        assert (word.oom_kills(), later.oom_kills()) == (kills, 1)
    assert KernelWord().oom_kills() == 0
