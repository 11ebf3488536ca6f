"""What travels between replicas: rings and trees, shards inside a node, whole reductions, copies kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.config.cluster import SoftwareConfig
from llmtrain.config.layout import Layout
from llmtrain.plan.evaluate import Evaluator
from llmtrain.plan.machine import make_machine
from llmtrain.plan.timing.collectives import all_reduce, group, scatter_or_gather
from llmtrain.plan.workload import make_workload
from tests.support.plans import MEGATRON, a100, gpt, recipe

PIECE = 1e3
"""Bytes so few that a collective takes nothing but its latency."""


def evaluator(software, nodes=32, model=None, mode="bf16", accelerator="a100-80g-sxm"):
    cluster = replace(a100(nodes, software=software), accelerator=accelerator)
    what = recipe(model or gpt(24, 2048, 16), batch=8 * nodes * 4)
    return Evaluator(
        make_workload(replace(what, precision=replace(what.precision, mode=mode))), make_machine(cluster)
    )


def test_a_gather_waits_for_every_rank_of_its_ring_and_an_all_reduce_climbs_a_tree():
    machine = make_machine(a100(128))
    small, large = group(machine, 128, 1), group(machine, 1024, 1)
    assert scatter_or_gather(machine, large, PIECE) > 6 * scatter_or_gather(machine, small, PIECE)
    assert all_reduce(machine, large, PIECE) < 2 * all_reduce(machine, small, PIECE)


def test_shards_within_a_node_take_its_memory_and_suffer_less_from_a_large_cluster():
    software = replace(MEGATRON, framework="deepspeed")
    growth = []
    for trait in (software, replace(software, shard_within_node=True)):
        data, states = {}, {}
        for nodes in (4, 128):
            found, layout = evaluator(trait, nodes), Layout(dp=8 * nodes, zero=1, micro_batch=4)
            data[nodes] = found.breakdown(layout, 1).data
            states[nodes] = found.fullest(layout, 1).optimizer
        growth.append(data[128] / data[4])
        is_within = trait.shard_within_node
        assert states[128] == pytest.approx(states[4] * (1 if is_within else 4 / 128))
    assert growth[1] < 0.8 * growth[0]


def test_shards_within_a_node_are_all_there_are_on_one_node():
    layout = Layout(dp=4, tp=2, zero=1, micro_batch=4)
    alone, within = (
        evaluator(software, nodes=1) for software in (MEGATRON, replace(MEGATRON, shard_within_node=True))
    )
    assert within.seconds(layout, 1) == alone.seconds(layout, 1)
    assert within.fullest(layout, 1) == alone.fullest(layout, 1)


def test_a_whole_reduction_costs_more_than_a_shard_to_each():
    layout = Layout(dp=64, tp=4, zero=1, micro_batch=4)
    shards = evaluator(MEGATRON).breakdown(layout, 1).data
    whole = evaluator(replace(MEGATRON, framework="deepspeed")).breakdown(layout, 1).data
    assert 1.2 * shards < whole < 2 * shards


def test_half_precision_gradients_under_deepspeed_need_an_fp32_shard_for_the_update():
    half = replace(MEGATRON, framework="deepspeed", gradients="bf16")
    layout = Layout(dp=64, tp=4, zero=1, micro_batch=4)
    found = evaluator(half).fullest(layout, 1)
    weights = found.parameters / 2
    assert found.gradients == pytest.approx(2 * weights + 4 * weights / 64)


def test_gathers_in_fp8_halve_one_transfer_in_four():
    layout = Layout(dp=32, tp=8, sequence_parallel=True, micro_batch=4)
    plain, halved = (
        evaluator(replace(MEGATRON, fp8_gather=trait, overlap_tensor=0.0), mode="fp8", accelerator="h100-sxm")
        for trait in (False, True)
    )
    share = halved.breakdown(layout, 8).tensor / plain.breakdown(layout, 8).tensor
    assert 7 / 8 < share < 0.92  # one transfer of four a pass carries half, but waits as long as before
    in_bf16 = evaluator(replace(MEGATRON, fp8_gather=True))
    assert in_bf16.breakdown(layout, 8).tensor == evaluator(MEGATRON).breakdown(layout, 8).tensor


def test_this_engines_two_levels_shorten_the_rings_of_a_large_cluster():
    found = evaluator(SoftwareConfig(), nodes=256)
    layout = Layout(dp=2048, zero=1, micro_batch=4)
    flat = Evaluator(replace(found.work, two_levels=False), found.machine)
    assert found.breakdown(layout, 1).data < 0.8 * flat.breakdown(layout, 1).data
    one_node = Layout(dp=8, zero=1, micro_batch=4)
    assert found.seconds(one_node, 1) == flat.seconds(one_node, 1)
