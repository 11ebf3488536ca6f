"""`launch --rehearse`: failures on purpose with everything real, and what it says of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmtrain.cli.main import run
from llmtrain.cli.rehearsal import _table
from llmtrain.config.job import resolve
from llmtrain.errors import UsageError
from llmtrain.plan.make import make_plan
from llmtrain.supervise.rehearsal.rehearse import Outcome, _why_not, chosen
from llmtrain.supervise.rehearsal.scenarios import SCENARIOS, SMALL
from tests.support import launches

NAMES = os.environ.get("LLMTRAIN_REHEARSE", "death")


@pytest.mark.e2e
def test_scenarios_recover(tmp_path: Path) -> None:
    arguments = ("launch", "tiny", "--rehearse", NAMES, "--json")
    out, _ = launches.end(launches.start(tmp_path, *arguments, home=tmp_path), 0, 420.0 * len(chosen(NAMES)))
    told = json.loads(out)["scenarios"]
    assert [each["name"] for each in told] == [scenario.name for scenario in chosen(NAMES)]
    for each in told:
        assert each["recovered"] and not each["skipped"], each
        assert 0.0 <= each["detect_seconds"] <= each["recover_seconds"], each
    assert list((tmp_path / "runs").glob("rehearsal-*")) == [], "what went well is cleared away"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_scenario_can_be_planned(scenario) -> None:
    spec = resolve("tiny", "local", [*SMALL, *scenario.overrides])
    plan = make_plan(spec)
    assert plan.plans and not [problem for problem in plan.problems if "inject" in problem.where]
    assert spec.cluster.backend.kind == "local" and not _why_not(scenario, "local")


def test_names_of_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen("all") == SCENARIOS
    assert [scenario.name for scenario in chosen("hang, death")] == ["hang", "death"]
    with pytest.raises(UsageError):
        chosen("fire")
    assert run(["launch", "tiny", "--rehearse", "fire"]) == 2
    assert "known: death, hang" in capsys.readouterr().err
    assert run(["launch", "tiny", "--rehearse", "death", "--detach"]) == 2


def test_table_says_what_did_not_recover_and_what_was_left_out() -> None:
    outcomes = [
        Outcome(
            name="death", does="", recovered=True, detect_seconds=0.31, recover_seconds=7.26, what="rank 1"
        ),
        Outcome(name="hang", does="", recovered=False, what="the run did not end in time"),
        Outcome(name="lost-node", does="", recovered=False, skipped=True, what="only here"),
    ]
    assert _table(outcomes).splitlines() == [
        "scenario   detected  recovered",
        "death      0.3 s     7.3 s          rank 1",
        "hang       -         NOT RECOVERED  the run did not end in time",
        "lost-node  -         not rehearsed  only here",
    ]


def test_nodes_of_real_clusters_are_left_alone() -> None:
    left_out = {scenario.name for scenario in SCENARIOS if _why_not(scenario, "ssh")}
    assert left_out == {"lost-node", "returned-node", "corrupt-shard", "preemption"}
