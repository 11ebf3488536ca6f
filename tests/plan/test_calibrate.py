"""The fit finds constants that made the measurements, and one odd run does not bend it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmtrain.config.cluster import CalibrationConfig, EnvironmentConfig
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.plan.calibrate import WIDTHS, MeasuredStep, calibrated, fit, predict
from llmtrain.plan.evaluate import Evaluator, busiest
from llmtrain.plan.machine import make_machine
from llmtrain.plan.make import make_plan
from llmtrain.plan.workload import make_workload
from tests.support.plans import MEGATRON, a100, gpt, recipe, spec

MODELS = (gpt(24, 2048, 16), gpt(40, 5120, 40), gpt(96, 12288, 96))
LAYOUTS = (
    Layout(dp=64, tp=1, pp=1, micro_batch=4, recompute="full", zero=1),
    Layout(dp=16, tp=4, pp=1, micro_batch=2, recompute="full", zero=1),
    Layout(dp=8, tp=8, pp=1, micro_batch=1, recompute="full", zero=1),
    Layout(dp=2, tp=8, pp=4, micro_batch=1, recompute="full", zero=1),
)


def measurements(factors, noise=0.0):
    rng = random.Random(1)
    found = []
    for model in MODELS:
        for layout in LAYOUTS:
            step = MeasuredStep(
                recipe=recipe(model, batch=256),
                cluster=a100(8, software=MEGATRON),
                layout=layout,
                seconds=1.0,
            )
            seconds = predict(step, factors) * (1 + rng.gauss(0, noise))
            found.append(
                MeasuredStep(recipe=step.recipe, cluster=step.cluster, layout=layout, seconds=seconds)
            )
    return found


TRUE = {
    **dict.fromkeys(WIDTHS, 1.0),
    "gemm": 0.85,
    "memory_bandwidth": 0.9,
    "intra_node": 0.7,
    "inter_node": 1.3,
}


def test_predictions_follow_the_constants_that_made_the_data():
    found = fit(measurements(TRUE))
    assert found.worst < 0.025
    assert found.factors["gemm"] == pytest.approx(TRUE["gemm"], rel=0.05)
    assert found.factors["intra_node"] < 0.95, "twelve steps tell slower links from slower kernels"


def test_three_runs_predict_the_others():
    steps = measurements(TRUE, noise=0.01)
    factors = fit(steps[:9:4]).factors
    errors = [abs(predict(step, factors) / step.seconds - 1) for step in steps]
    before = [abs(predict(step) / step.seconds - 1) for step in steps]
    assert sum(errors) / len(errors) < 0.05
    assert sum(errors) < 0.4 * sum(before)


def test_one_odd_run_does_not_bend_the_constants():
    steps = measurements(TRUE)
    odd = MeasuredStep(
        recipe=steps[0].recipe, cluster=steps[0].cluster, layout=steps[0].layout, seconds=3 * steps[0].seconds
    )
    factors = fit([odd, *steps[1:]]).factors
    assert factors["gemm"] == pytest.approx(TRUE["gemm"], rel=0.1)


def test_without_evidence_nothing_moves():
    steps = [
        MeasuredStep(recipe=s.recipe, cluster=s.cluster, layout=s.layout, seconds=predict(s))
        for s in measurements({**TRUE, "gemm": 1.0})
    ]
    assert all(value == pytest.approx(1.0, abs=0.01) for value in fit(steps).factors.values())


def test_a_calibrated_profile_predicts_with_a_narrower_band():
    steps = measurements(TRUE)
    cluster = a100(8, software=MEGATRON)
    constants = calibrated(cluster, fit(steps), date="2026-01-31", evidence="12 steps")
    before = make_plan(spec(recipe(MODELS[1], batch=256), cluster)).plans[0].predicted
    job = spec(recipe(MODELS[1], batch=256), replace(cluster, calibration=constants))
    assert make_plan(job).plans[0].predicted.error < before.error
    step = steps[5]
    layout_plan = make_plan(spec(step.recipe, replace(cluster, calibration=constants)), layout=step.layout)
    assert layout_plan.plans[0].predicted.step_seconds == pytest.approx(step.seconds, rel=0.02)


@pytest.mark.parametrize(
    ("constants", "mode", "threads", "words"),
    [
        ({}, "fp32", None, []),
        ({"gemm": 0.5}, "bf16", None, ["without `cores`"]),
        ({"gemm": 0.5, "cores": 4.0}, "bf16", "1", []),
        ({"gemm": 0.5, "cores": 4.0}, "fp32", "8", ["in FP32", "OMP_NUM_THREADS=8"]),
        ({"gemm": 0.5, "cores": 4.0, "intra_node": 1.1}, "fp32", "8", []),  # fitted to runs as well
    ],
)
def test_what_constants_of_cpu_ranks_do_not_cover_is_told(constants, mode, threads, words):
    local = resolve("tiny", "local").cluster
    variables = {} if threads is None else {"OMP_NUM_THREADS": threads}
    cluster = replace(
        local,
        calibration=CalibrationConfig(**constants, date="2026-01-31"),
        environment=EnvironmentConfig(variables=variables),
    )
    job = replace(resolve("tiny", "local", [f"precision.mode={mode}"]), cluster=cluster)
    plan = make_plan(job)
    told = [problem.message for problem in plan.problems if problem.where == "calibration"]
    assert len(told) == len(words)
    assert all(word in message for word, message in zip(words, told, strict=True))
    assert (plan.plans[0].predicted.error < 0.5) == ("cores" in constants)


def test_a_fit_to_cpu_steps_keeps_the_cores_that_it_assumed():
    job = resolve("tiny", "local")
    layout = Layout(dp=2, tp=2, pp=2, micro_batch=2)
    step = MeasuredStep(recipe=job.recipe, cluster=job.cluster, layout=layout, seconds=0.4)
    assert job.cluster.calibration.cores is None
    assert calibrated(job.cluster, fit([step]), date="2026-01-31", evidence="1 step").cores == 2.0


def test_hand_overs_between_stages_are_counted_once_on_shared_cores():
    """Twice the stages of a pipeline have three borders instead of one, not four."""
    job = resolve("tiny", "local")
    machine = make_machine(job.cluster)
    evaluator = Evaluator(make_workload(job.recipe), machine)

    def handed_over(pp):
        layout = Layout(dp=2, pp=pp, micro_batch=2)
        parts = evaluator.breakdown(layout, busiest(layout, job.recipe.batch.global_size))
        assert parts.bubble == 0.0
        return parts.pipeline

    assert handed_over(4) == pytest.approx(3 * handed_over(2), rel=0.05)
