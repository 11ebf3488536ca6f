"""Differences that add up, short names of --what-if, the optimism guard, and the text of --why."""

from __future__ import annotations

import pytest

from llmtrain.cli.plan_views.why import comparison_text, why_text
from llmtrain.config.layout import Layout
from llmtrain.errors import UsageError
from llmtrain.plan.compare import changed_settings, differences, exposed_parts, plain_settings
from llmtrain.plan.make import make_evaluator, make_plan
from llmtrain.plan.trust import best_published, optimism
from llmtrain.plan.what_if import what_if_overrides
from tests.support.plans import GPT_175B, a100, parts, recipe, spec


def test_differences_add_up_to_the_difference_of_the_steps():
    first, second = make_plan(spec()).plans[:2]
    total = sum(d.change for d in differences(first, second))
    assert total == pytest.approx(second.predicted.step_seconds - first.predicted.step_seconds)
    assert changed_settings(first.layout, second.layout)


def test_the_step_is_the_sum_of_its_parts():
    best = make_plan(spec()).plans[0]
    assert sum(seconds for _, seconds in exposed_parts(best.parts)) == pytest.approx(
        best.predicted.step_seconds
    )


def test_the_chosen_plan_beats_plain_settings():
    job = spec()
    best = make_plan(job).plans[0]
    plain = plain_settings(make_evaluator(job), best)
    assert (plain.layout.dp, plain.layout.tp, plain.layout.pp) == (
        best.layout.dp,
        best.layout.tp,
        best.layout.pp,
    )
    assert plain.predicted.step_seconds > 1.2 * best.predicted.step_seconds
    assert plain.predicted.memory.total > 0


def test_why_names_the_sum_the_refused_and_the_runner_up():
    job = spec()
    plan = make_plan(job)
    text = why_text(plan, plain_settings(make_evaluator(job), plan.plans[0]))
    for words in (
        "as a sum",
        "pipeline bubble",
        "plan 1 against plan 2",
        "Before and after",
        "GB > ",
        "Refused: ",
    ):
        assert words in text
    assert "compared" not in comparison_text(plan.plans[0], plan.plans[1], ("a", "b"))


def test_what_if_takes_short_and_full_names():
    assert what_if_overrides("nodes=30 batch.micro=2,tp=4") == [
        "cluster.nodes=30",
        "batch.micro=2",
        "parallel.tp=4",
    ]
    with pytest.raises(UsageError, match="not of the form key=value"):
        what_if_overrides("nodes 30")
    with pytest.raises(UsageError, match="nothing to change"):
        what_if_overrides(" ")


def test_the_guard_speaks_up_above_the_best_published():
    work, machine = parts(recipe(), a100())
    evaluator = make_evaluator(spec())
    honest = evaluator.candidate(Layout(dp=8, tp=8, pp=4, sequence_parallel=True, zero=1))
    limit = best_published("a100-80g-sxm", 175e9, fp8=False)
    assert limit == pytest.approx(0.563)
    warned = optimism(honest, machine, 175e9, work.mode)
    assert (warned is not None) == (honest.predicted.mfu > limit)
    assert optimism(honest, machine, 1e9, work.mode) is None or honest.predicted.mfu > 0.64
    assert best_published("cpu", 1e9, fp8=False) is None


def test_the_guard_warns_on_an_impossible_calibration():
    from dataclasses import replace

    from llmtrain.config.cluster import CalibrationConfig

    fast = a100(calibration=CalibrationConfig(gemm=1.0, memory_bandwidth=1.0, launch_gap=0.0))
    fast = replace(fast, software=replace(fast.software, fused_kernels=True))
    plan = make_plan(spec(recipe(GPT_175B, batch=2048), fast))
    assert any("the best published" in problem.message for problem in plan.problems)
