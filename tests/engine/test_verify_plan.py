"""`plan --verify`: the planner's bytes against the engine's real model, counted on the meta device."""

from __future__ import annotations

import pytest

from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.plan.make import make_evaluator

pytestmark = pytest.mark.engine

SP = {"sequence_parallel": True}
CASES = [
    ("gpt-175b", Layout(dp=8, tp=8, pp=4, micro_batch=2, **SP), 32, 0.01),
    (
        "gpt-175b",
        Layout(dp=8, tp=8, pp=4, vpp=6, schedule="interleaved", recompute="selective", **SP),
        64,
        0.01,
    ),
    ("gpt-175b", Layout(dp=8, tp=8, pp=4, micro_batch=4, recompute="full", **SP), 16, 0.01),
    ("gpt-175b", Layout(dp=8, tp=4, pp=8), 64, 0.01),
    ("llama-70b", Layout(dp=8, tp=8, pp=4, **SP), 16, 0.015),
    ("llama-8b", Layout(dp=64, tp=4, pp=1, **SP), 4, 0.015),
    ("llama-8b", Layout(dp=64, tp=4, pp=1, zero=2, **SP), 4, 0.02),
    # 2.4 % too much is predicted: the buffers of a block that is computed again do not all live at once.
    ("llama-8b", Layout(dp=64, tp=4, pp=1, zero=3, recompute="full", **SP), 4, 0.03),
    ("llama-70b", Layout(dp=16, tp=8, pp=2, zero=3, **SP), 4, 0.03),
    ("tiny", Layout(dp=2, tp=2, pp=2, micro_batch=2), 4, 0.05),
    ("tiny", Layout(dp=8, micro_batch=2), 1, 0.05),
]


@pytest.mark.parametrize(("recipe", "layout", "micro_batches", "limit"), CASES)
def test_predicted_bytes_are_those_of_the_real_model(recipe, layout, micro_batches, limit):
    from llmtrain.engine.verify_plan import count_stage

    spec = resolve(recipe, "local" if recipe == "tiny" else "a100-32x8")
    model = make_evaluator(spec).memory_model
    for stage in sorted({0, layout.pp - 1}):
        counted = count_stage(spec, layout, stage, micro_batches)
        predicted = model.stage(layout, stage, micro_batches)
        assert predicted.parameters == pytest.approx(counted["parameters"], rel=0.001)
        assert predicted.gradients == pytest.approx(counted["gradients"], rel=0.002)
        assert predicted.optimizer == pytest.approx(counted["optimizer"], rel=0.002)
        total = sum(value for kind, value in counted.items() if kind != "stage")
        assert predicted.allocated == pytest.approx(total, rel=limit)
