"""The search finds what brute force finds, says why the rest is refused, and keeps the batch on all rungs."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.config.recipe import ParallelConfig
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.layouts.constraints import refusals
from llmtrain.plan.layouts.engine_features import ANY_ENGINE, OWN_ENGINE, EngineFeatures
from llmtrain.plan.layouts.points import TIE
from llmtrain.plan.layouts.search import Search
from llmtrain.plan.make import make_plan
from tests.support.plans import MEGATRON, a100, gpt, local, parts, recipe, spec

PLAIN = EngineFeatures()


def evaluator(what, where):
    return Evaluator(*parts(what, where))


def test_it_finds_the_best_that_brute_force_finds():
    what, where = recipe(gpt(8, 2048, 16), batch=16), a100(1, software=MEGATRON)
    subject = evaluator(what, where)
    found = Search(subject, what, PLAIN).run(1)
    fitting = {}
    for tp in range(1, 9):
        for pp in range(1, 9):
            for dp in range(1, 9):
                for micro in range(1, 17):
                    layout = Layout(dp=dp, tp=tp, pp=pp, micro_batch=micro, zero=1)
                    if dp * tp * pp != 8:
                        continue
                    if any(refusals(subject.work, layout, subject.machine, 1, PLAIN)):
                        continue
                    candidate = subject.candidate(layout)
                    if candidate.predicted.memory.total <= subject.usable_memory:
                        fitting[layout] = candidate.predicted.step_seconds
    assert fitting
    fastest = min(fitting.values())
    assert found.candidates[0].predicted.step_seconds <= fastest * (1 + TIE)
    assert min(c.predicted.step_seconds for c in found.candidates) == pytest.approx(fastest)


def test_what_the_recipe_fixes_is_respected():
    fixed = ParallelConfig(tp=8, pp=4, recompute="selective", sequence_parallel=True)
    plan = make_plan(spec(recipe(parallel=fixed, micro=2)))
    for candidate in plan.plans:
        layout = candidate.layout
        assert (layout.tp, layout.pp, layout.recompute, layout.sequence_parallel) == (8, 4, "selective", True)
        assert layout.micro_batch == 2


def test_nothing_the_engine_cannot_run_is_offered():
    plan = make_plan(spec(), top=1000)
    for candidate in plan.plans:
        assert not list(OWN_ENGINE.missing(candidate.layout))
    only_plain = make_plan(spec(recipe(gpt(24, 2048, 16), batch=64)), features=PLAIN, top=1000)
    assert {c.layout.schedule for c in only_plain.plans} == {"1f1b"}
    assert not any(c.layout.sequence_parallel for c in only_plain.plans)


def test_a_tie_goes_to_the_simpler_layout():
    plan = make_plan(spec(recipe(gpt(24, 1024, 16), batch=256), a100(1)), top=1000)
    first = plan.plans[0]
    fastest = min(c.predicted.step_seconds for c in plan.plans)
    assert first.predicted.step_seconds <= fastest * (1 + TIE)
    assert (first.layout.pp, first.layout.vpp, first.layout.cp) == (1, 1, 1)


def test_the_pareto_front_has_no_beaten_member():
    plan = make_plan(spec())
    front = [(c.predicted.step_seconds, c.predicted.memory.total) for c in plan.front]
    assert len(front) > 3
    assert front == sorted(front)
    assert all(later[1] < earlier[1] for earlier, later in pairwise(front))


def test_refusals_carry_both_numbers_and_add_up():
    what, where = recipe(), a100()
    found = Search(evaluator(what, where), what, OWN_ENGINE).run(32)
    assert found.refused.total + found.fitting == found.evaluated
    memory = found.refused.examples["memory"].message
    assert "GB > " in memory and "usable" in memory
    assert "= " in found.refused.examples["world size"].message


@pytest.mark.quiet
def test_gpt_175b_on_256_gpus_takes_under_a_second_and_300_mb():
    what, where = recipe(), a100()
    start = time.process_time()
    found = Search(evaluator(what, where), what, ANY_ENGINE).run(32)
    seconds = time.process_time() - start
    assert found.evaluated > 10_000
    assert seconds < 1.0
    assert seconds / found.evaluated < 50e-6
    tracemalloc.start()
    Search(evaluator(what, where), what, ANY_ENGINE).run(32)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


@pytest.mark.quiet
def test_16384_gpus_take_under_ten_seconds_with_the_whole_ladder():
    start = time.process_time()
    plan = make_plan(spec(recipe(batch=4096), a100(2048)), features=ANY_ENGINE)
    assert time.process_time() - start < 10.0
    assert len(plan.ladder) == 2048 - 1639 + 1


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 40),
    batch=st.integers(1, 700),
    layers=st.sampled_from([7, 12, 31, 96]),
    budget=st.floats(0.0, 0.6),
)
def test_every_rung_keeps_the_batch_and_fits(nodes, batch, layers, budget):
    what = recipe(gpt(layers, 1024, 16), batch=batch)
    what = replace(what, faults=replace(what.faults, node_loss_budget=budget))
    plan = make_plan(spec(what, a100(nodes)))
    assert [rung.nodes for rung in plan.ladder] == list(range(nodes, nodes - len(plan.ladder), -1))
    for rung in plan.ladder:
        assert rung.candidate is not None
        layout = rung.candidate.layout
        assert sum(rung.micro_batches) * layout.micro_batch == batch
        assert max(rung.micro_batches) - min(rung.micro_batches) <= 1
        assert layout.world_size <= rung.nodes * 8
        assert rung.idle_nodes == rung.nodes - -(-layout.world_size // 8)
        assert rung.candidate.predicted.memory.total <= rung.candidate.predicted.memory.capacity


def test_the_ladder_of_the_reference_goes_from_32_to_26():
    plan = make_plan(spec())
    assert [rung.nodes for rung in plan.ladder] == [32, 31, 30, 29, 28, 27, 26]
    steps = [rung.candidate.predicted.step_seconds for rung in plan.ladder]
    assert steps == sorted(steps)


def test_spares_are_not_planned_on():
    plan = make_plan(spec(where=a100(spares=2)))
    assert plan.plans[0].layout.world_size <= 30 * 8
    assert [rung.idle_nodes for rung in plan.ladder][:2] >= [2, 1]


def test_the_tiny_job_plans_on_the_local_profile():
    model = ModelConfig(kind="llama", layers=8, hidden=128, heads=4, kv_heads=2, vocab=256, sequence=128)
    what = recipe(model, batch=16, micro=2, parallel=ParallelConfig(dp=2, tp=2, pp=2))
    plan = make_plan(spec(what, local()))
    layout = plan.plans[0].layout
    assert (layout.dp, layout.tp, layout.pp, layout.micro_batch) == (2, 2, 2, 2)
    assert (layout.schedule, layout.vpp) == ("1f1b", 1), "on shared cores a bubble costs nothing"
    assert plan.plans[0].accumulation == 4
