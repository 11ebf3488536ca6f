"""Simulated weeks: published failure rates, clusters of three sizes; wrong detectors and policies would
be seen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmtrain.cli.main import run
from llmtrain.config.layout import Layout
from llmtrain.supervise.decision.policy import Decision
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.simulation import presets
from llmtrain.supervise.simulation import simulate as simulation
from llmtrain.supervise.simulation.account import Account
from llmtrain.supervise.simulation.model import Scenario
from llmtrain.supervise.simulation.simulate import simulate
from llmtrain.supervise.simulation.trace import DAY, Rates, draw_trace

MEASURED = ("false alarm", "failure never found", "another node blamed", "other node named as slow")


def check_sums(account: Account, scenario: Scenario) -> None:
    """The clock and the account agree, and nothing was found that was not there."""
    assert scenario.seconds - 1e-3 <= account.total < scenario.seconds + 2 * 3600
    assert min(account.parts.values()) >= 0.0
    assert not [name for name in MEASURED if account.wrong[name]], account.wrong
    assert not [name for name in account.wrong if name.startswith("gave up")]


@pytest.mark.parametrize("seed", range(3))
def test_opt_s_failures_cost_less_than_five_percent(seed: int) -> None:
    scenario = presets.opt()
    account = simulate(scenario, seed)
    check_sums(account, scenario)
    assert account.goodput >= 0.95
    assert account.incidents["node"] > 80
    assert account.decisions["exit 93: past the budget"] >= 2, "two nodes a day exceed a fifth in twelve days"
    assert account.most_lost == account.losable + 1


def test_llama_3_s_failures_cost_less_than_five_percent() -> None:
    """Twelve of the 54 days; `llmtrain simulate --preset llama3` plays all."""
    scenario = presets.llama3(12.0)
    account = simulate(scenario, 1)
    check_sums(account, scenario)
    assert account.goodput >= 0.95
    assert 60 < account.incidents["rank"] + account.incidents["node"] + account.incidents["hang"] < 150
    assert max(account.detected["rank"]) < 2.0 and max(account.detected["node"]) < 12.0
    assert max(account.detected["hang"]) < 40.0, "three times the slowest step of ten seconds"


def small(nodes: int, **changes: object) -> Scenario:
    """Pipelines of two nodes, with more failures than any cluster has."""
    made = presets.published(
        "small",
        layout=Layout(dp=nodes // 2, tp=8, pp=2),
        batch=4 * nodes,
        rates=Rates(
            interruptions_per_day=nodes / 8.0,
            shares={"rank": 0.4, "node": 0.5, "hang": 0.1},
            repair=DAY / 4,
        ),
        days=10.0,
        took=presets.durations(7e9, nodes, 1e11, 1e11, 5.0),
        assumptions=(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [32, 256])
def test_clusters_that_fail_too_often(nodes: int) -> None:
    scenario = small(nodes)
    account = simulate(scenario, 3)
    check_sums(account, scenario)
    assert 0.5 < account.goodput < 0.999
    assert account.decisions["restart"] > 20


def test_the_same_seed_is_the_same_run() -> None:
    first, again, other = (simulate(small(32), seed).document() for seed in (5, 5, 6))
    assert first == again != other


def test_spares_in_the_place_of_slow_nodes_are_worth_something() -> None:
    rates = Rates(interruptions_per_day=0.2, shares={"rank": 1.0}, repair=DAY, slow_nodes_per_day=2.0)
    told = small(32, rates=rates)
    recipe = told.job.spec.recipe
    recipe = replace(recipe, faults=replace(recipe.faults, slow_ranks="replace"))
    replaced = replace(told, job=replace(told.job, spec=replace(told.job.spec, recipe=recipe)))
    for seed in range(3):
        before, after = simulate(told, seed), simulate(replaced, seed)
        check_sums(after, replaced)
        assert before.incidents["slow_node"] > 10 and not before.decisions["replace a slow node"]
        assert after.decisions["replace a slow node"] > 5 and after.most_lost == 0
        slower = "slower by a slow node"
        assert after.parts[slower] < 0.5 * before.parts[slower] and after.goodput > before.goodput


def test_without_failures_nothing_is_lost() -> None:
    quiet = Rates(interruptions_per_day=0.0, shares={"rank": 1.0}, repair=DAY)
    account = simulate(small(32, rates=quiet), 0)
    assert account.attempts == 1 and account.goodput > 0.99
    assert set(account.parts) <= {
        "start",
        "saving",
        "productive",
        "done again",
        "slower on a lower rung",
        "slower by a slow node",
    }


def test_more_spares_and_faster_starts_are_worth_something() -> None:
    scenario = small(32)
    slow = replace(scenario, durations=replace(scenario.durations, start=900.0))
    assert simulate(slow, 2).goodput < simulate(scenario, 2).goodput - 0.01


def test_a_detector_that_is_too_hasty_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = Limits(phases={"step": 20.0, "checkpoint": 60.0})
    monkeypatch.setattr(simulation, "limits_for", lambda step: hasty)
    assert simulate(small(32), 0).wrong["false alarm"] > 0


def test_a_policy_that_gives_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: object) -> Decision:
        return Decision(action="give_up", reason="tired")

    monkeypatch.setattr(simulation, "decide", give_up)
    assert simulate(small(32), 0).wrong["give_up: tired"] > 0


def test_trace_has_the_rates_that_were_asked_for() -> None:
    rates = Rates(interruptions_per_day=10.0, shares={"rank": 0.3, "node": 0.7}, repair=DAY)
    trace = draw_trace(rates, 100, 200 * DAY, seed=1)
    kinds = [incident.kind for incident in trace]
    assert 1800 < kinds.count("rank") + kinds.count("node") < 2200
    assert 0.65 < kinds.count("node") / (kinds.count("rank") + kinds.count("node")) < 0.75
    assert [each.at for each in trace] == sorted(each.at for each in trace)
    repairs = [each.repair for each in trace if each.kind == "node"]
    assert 0.85 * DAY < sum(repairs) / len(repairs) < 1.15 * DAY and min(repairs) >= 600.0


def test_command_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--preset", "opt", "--days", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["goodput"] > 0.9 and document["assumptions"] and document["nodes"] == 127
    assert run(["simulate", "tiny", "--days", "1"]) == 0
    assert "assumed:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["simulate"], "give a RECIPE or a --preset"),
        (["simulate", "tiny", "--preset", "opt"], "give a RECIPE or a --preset"),
        (["simulate", "--preset", "bloom"], "no preset `bloom`"),
        (["simulate", "--preset", "opt", "--set", "cluster.nodes=3"], "--set does not go with --preset"),
    ],
)
def test_wrong_usage(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert word in capsys.readouterr().err
