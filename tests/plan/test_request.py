"""The reference request: exactly what contradicts what, the knob for each, and plans that work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.config.job import resolve
from llmtrain.config.recipe import RequestConfig
from llmtrain.plan.make import make_plan
from llmtrain.plan.request import request_problems
from tests.support.plans import MEGATRON, a100, parts, recipe, spec

REQUEST = RequestConfig(dp=8, tp=8, pp=4, micro=16, accumulation=4, global_size=32768, bubble=0.12)


def problems(request=REQUEST, software=MEGATRON):
    what = recipe(request=request)
    return {p.where: p for p in request_problems(what, parts(what, a100(software=software))[1])}


def test_the_three_contradictions_are_named_with_both_numbers():
    found = problems()
    assert set(found) == {"request.global", "request.bubble", "request.micro"}
    batch = found["request.global"]
    assert "8 x micro 16 x accumulation 4 = 512 sequences, not 32768" in batch.message
    assert "as tokens it is 16 sequences, fewer than one micro-batch a replica (128)" in batch.message
    assert "set accumulation to 256" in batch.hint and "global to 512" in batch.hint
    bubble = found["request.bubble"]
    assert "3/7 = 42.9 % > 12.0 %" in bubble.message
    assert "vpp to 6 (11.1 %)" in bubble.hint and "accumulation to at least 22 (12.0 %)" in bubble.hint
    memory = found["request.micro"]
    assert "stage 0 needs" in memory.message and "> 80 GB" in memory.message
    need = float(memory.message.split("selective ")[1].split()[0])
    assert need == pytest.approx(215, abs=15)
    assert "recompute full fits" in memory.hint


def test_a_request_that_holds_together_has_no_problems():
    fine = RequestConfig(dp=8, tp=8, pp=4, micro=1, accumulation=64, global_size=512, bubble=0.12)
    assert problems(fine) == {}


def test_proposals_keep_the_degrees_and_the_limits():
    plan = make_plan(spec(recipe(request=REQUEST)))
    by_title = {proposal.title: proposal.candidate for proposal in plan.proposals}
    near = by_title["same degrees, 512 sequences"]
    assert (near.layout.dp, near.layout.tp, near.layout.pp) == (8, 8, 4)
    assert near.accumulation * near.layout.micro_batch * 8 == 512
    large = by_title["same degrees, 32768 sequences"]
    assert large.accumulation * large.layout.micro_batch * 8 == 32768
    for candidate in by_title.values():
        assert candidate.predicted.bubble_ratio <= 0.12
        assert candidate.predicted.memory.total <= 0.96 * 80e9
        assert candidate.predicted.error > 0
    assert 0.45 < near.predicted.mfu < 0.62


def test_the_shipped_recipe_plans_and_says_the_same():
    job = resolve("reference-request", "a100-32x8")
    plan = make_plan(job)
    assert plan.plans[0].layout.world_size == 256
    assert {"request.global", "request.bubble", "request.micro"} <= {p.where for p in plan.problems}
    assert len(plan.proposals) >= 2


def test_recipes_without_a_request_propose_nothing():
    assert make_plan(spec(replace(recipe(), request=None))).proposals == ()
