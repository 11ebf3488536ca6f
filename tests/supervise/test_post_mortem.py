"""Every failed attempt leaves a post-mortem: for programs, for people, and named in the events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import stand_in_runs as runs


def post_mortem(run: RunDir, attempt: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.attempt(attempt).post_mortem_json.read_text())
    return found


def test_killed_rank(make: Callable[..., RunDir]) -> None:
    run = make(steps=4, die={"rank": 1, "step": 2})
    assert runs.supervise(run).wait(150) == 0
    found = post_mortem(run)
    assert (found["cause"], found["finding"], found["rank"]) == ("signal", "rank_dead", 1)
    assert found["last_lines"] == ["last words of a dying rank"]
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert "SIGKILL" in found["ranks"][1]["end"]
    text = run.attempt(1).post_mortem_text.read_text()
    assert text.startswith("Attempt 1 ended because a process was killed by a signal: rank 1 on ")
    assert "  last words of a dying rank" in text
    told = [event.payload.message for event in runs.events(run, "notice")]
    assert any(str(run.attempt(1).post_mortem_text) in message for message in told)
    assert not run.attempt(2).post_mortem_json.exists(), "nothing went wrong there"


def test_error_in_the_code(make: Callable[..., RunDir]) -> None:
    run = make(steps=4, fail={"rank": 1, "step": 2, "class": "user_code"})
    assert runs.supervise(run).wait(150) == 0
    found = post_mortem(run)
    assert (found["cause"], found["rank"], found["step"]) == ("user_code", 1, 2)
    assert "Boom: it broke" in found["verdict"]
    assert read_record(run).attempts[-1].outcome == "completed"


def test_a_run_without_failures_has_none(make: Callable[..., RunDir]) -> None:
    run = make(steps=2)
    assert runs.supervise(run).wait(150) == 0
    assert not run.attempt(1).post_mortem_json.exists()
