"""`make_plan` and its document: contract keys, bad input with numbers, the nearest miss."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from llmtrain.config.cluster import AcceleratorConfig, LinkConfig
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import ParallelConfig
from llmtrain.errors import ConfigError, ExitStatus, InfeasibleError
from llmtrain.plan import make_plan, plan_document
from llmtrain.plan.layouts.engine_features import ANY_ENGINE
from tests.support.plans import GPT_175B, a100, gpt, recipe, spec


def test_the_document_has_the_contract_s_keys():
    document = plan_document(make_plan(spec()))
    json.dumps(document)
    assert document["schema"] == 1
    assert set(document["model"]) == {"parameters", "flops_per_token"}
    plan = document["plans"][0]
    assert set(plan["layout"]) == {
        *("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "sequence_parallel", "micro_batch", "schedule"),
        "recompute",
    }
    assert set(plan["batch"]) == {"global", "accumulation"}
    assert set(plan["predicted"]) >= {
        *("step_seconds", "tokens_per_second_per_gpu", "model_flops_per_gpu", "mfu", "hfu", "bubble_ratio"),
        *("communication_ratio", "exposed_communication_ratio", "memory_bytes", "train_days", "gpu_hours"),
    }
    memory = plan["predicted"]["memory_bytes"]
    kinds = ("parameters", "gradients", "optimizer", "activations", "workspace")
    assert set(memory) == {*kinds, "total", "capacity"}
    assert memory["total"] == pytest.approx(sum(memory[kind] for kind in kinds), abs=5)
    assert [rung["nodes"] for rung in document["ladder"]] == list(range(32, 25, -1))


def test_the_parts_add_up_to_the_step():
    for candidate in make_plan(spec(), features=ANY_ENGINE, top=50).plans:
        parts, predicted = candidate.parts, candidate.predicted
        assert parts.total == pytest.approx(predicted.step_seconds)
        assert predicted.exposed_communication_ratio <= predicted.communication_ratio + 1e-12
        assert 0 < predicted.mfu <= predicted.hfu < 1


def test_a_fixed_layout_is_evaluated_not_searched():
    layout = Layout(dp=8, tp=8, pp=4, micro_batch=1, sequence_parallel=True, zero=1)
    plan = make_plan(spec(), layout=layout)
    assert [candidate.layout for candidate in plan.plans] == [layout]
    assert plan.plans[0].accumulation == 64


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(dp=8, tp=8, pp=8), "= 512 > 256"),
        (Layout(dp=16, tp=16, pp=1), "tp 16 > 8 accelerators in a node"),
        (Layout(dp=8, tp=8, pp=4, micro_batch=7), "512 mod batch.micro 7 = 1"),
        (Layout(dp=8, tp=8, pp=4, micro_batch=128), "4 micro-batches < dp 8"),
        (Layout(dp=85, tp=3, pp=1), "8 accelerators in a node mod tp 3 = 2"),
        (Layout(dp=2, tp=1, pp=100), "pp 100 > 96 layers"),
    ],
)
def test_an_impossible_layout_is_refused_with_numbers(layout, words):
    with pytest.raises(InfeasibleError) as caught:
        make_plan(spec(), layout=layout)
    assert words in caught.value.text()
    assert caught.value.exit_status == ExitStatus.INFEASIBLE


def test_a_layout_that_does_not_fit_says_what_would():
    layout = Layout(dp=8, tp=8, pp=4, micro_batch=16, sequence_parallel=True)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(spec(), layout=layout)
    text = caught.value.text()
    assert "stage 0 needs" in text and "of 80.0 GB" in text
    assert "recompute full brings it to" in text
    assert "micro-batch 1 brings it to" in text


def test_when_nothing_fits_the_nearest_miss_says_how_many_nodes_are_enough():
    with pytest.raises(InfeasibleError) as caught:
        make_plan(spec(recipe(GPT_175B), a100(2)))
    text = caught.value.text()
    assert "no layout fits on 2 nodes" in text
    assert "nearest layout" in text and "nodes are enough" in text
    enough = int(text.split(" nodes are enough")[0].split()[-1])
    assert make_plan(spec(recipe(GPT_175B), a100(enough))).plans
    with pytest.raises(InfeasibleError):
        make_plan(spec(recipe(GPT_175B), a100(enough - 1)))


def test_a_prime_number_of_layers_and_nodes_still_plans():
    plan = make_plan(spec(recipe(gpt(31, 2048, 16), batch=509), a100(13)))
    assert plan.plans[0].predicted.step_seconds > 0
    assert sum(plan.ladder[0].micro_batches) * plan.plans[0].layout.micro_batch == 509


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intra_node": LinkConfig(kind="nvlink3", bandwidth=0.0)}, "bandwidth is 0 bytes/s"),
        ({"inter_node": None}, "nodes=32 > 1, but no link between nodes"),
        ({"accelerator": "a100-80gb"}, "did you mean a100-80g"),
        ({"intra_node": LinkConfig(kind="magic")}, "'magic' is not in the hardware table"),
        ({"spares": 32}, "spares=32 leaves none of nodes=32"),
        (
            {"accelerator": AcceleratorConfig(name="x", peak_flops=1e14, memory=0.0, memory_bandwidth=1e12)},
            "memory is 0, must be more than 0",
        ),
    ],
)
def test_unusable_profiles_are_config_errors_with_numbers(changes, words):
    with pytest.raises(ConfigError) as caught:
        make_plan(spec(where=a100(**changes)))
    assert words in caught.value.text()


def test_hardware_in_numbers_plans_with_a_wider_band():
    known = make_plan(spec()).plans[0].predicted.error
    own = AcceleratorConfig(name="new-chip", peak_flops=500e12, memory=120e9, memory_bandwidth=4e12)
    unknown = make_plan(spec(where=a100(accelerator=own))).plans[0].predicted.error
    assert unknown > known > 0


def test_more_bandwidth_and_more_nodes_are_never_slower():
    steps = []
    for nodes in (8, 16, 32):
        plan = make_plan(spec(recipe(gpt(32, 4096, 32), batch=1024), a100(nodes)), top=1000)
        steps.append(min(c.predicted.step_seconds for c in plan.plans))
    assert steps == sorted(steps, reverse=True)


def test_planning_for_fewer_nodes_than_the_profile_has():
    plan = make_plan(spec(), nodes=16)
    assert plan.plans[0].layout.world_size <= 128
    assert plan.ladder[0].nodes == 16


def test_a_fixed_dp_that_leaves_ranks_over_is_kept():
    what = recipe(gpt(24, 2048, 16), batch=64, parallel=ParallelConfig(dp=4, tp=2, pp=1))
    plan = make_plan(spec(what, a100(1)))
    assert plan.plans[0].layout.world_size == 8


def test_the_library_face_loads_neither_torch_nor_numpy():
    code = (
        "import sys; from llmtrain.plan import make_plan, plan_document; "
        "print(sorted({'torch', 'numpy', 'paramiko', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_plan_is_pure():
    job = spec()
    assert plan_document(make_plan(job)) == plan_document(make_plan(replace(job)))
