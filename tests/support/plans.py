"""Job specs for planner tests, made from values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmtrain.config.cluster import (
    BackendConfig,
    ClusterProfile,
    InterNodeConfig,
    LinkConfig,
    SoftwareConfig,
    StorageConfig,
)
from llmtrain.config.job import JobSpec
from llmtrain.config.model import ModelConfig
from llmtrain.config.recipe import BatchConfig, ParallelConfig, Recipe, RequestConfig, TrainConfig
from llmtrain.plan.machine import Machine, make_machine
from llmtrain.plan.workload import Workload, make_workload

MEGATRON = SoftwareConfig(
    framework="megatron",
    attention="unfused",
    fused_kernels=True,
    dropout=True,
    gradients="fp32",
    pipeline_scatter=False,
    overlap_gradients=False,
    overlap_tensor=0.0,
)
"""Megatron-LM as in Korthikanti et al. 2022."""


def gpt(layers: int, hidden: int, heads: int, *, vocab: int = 51200, sequence: int = 2048) -> ModelConfig:
    """A GPT with all defaults of its family."""
    return ModelConfig(kind="gpt", layers=layers, hidden=hidden, heads=heads, vocab=vocab, sequence=sequence)


GPT_175B = gpt(96, 12288, 96)


def a100(nodes: int = 32, **changes: Any) -> ClusterProfile:
    """Nodes of eight A100-80G on 8 x 200 Gb/s InfiniBand."""
    base = ClusterProfile(
        name="a100",
        nodes=nodes,
        gpus_per_node=8,
        accelerator="a100-80g-sxm",
        host_memory=1e12,
        intra_node=LinkConfig(kind="nvlink3"),
        inter_node=InterNodeConfig(
            data=LinkConfig(kind="ib-hdr", bandwidth=200e9), control=LinkConfig(kind="tcp")
        ),
        storage=StorageConfig(bandwidth=50e9),
        backend=BackendConfig(kind="slurm"),
    )
    return replace(base, **changes)


def local(ranks: int = 8, **changes: Any) -> ClusterProfile:
    """CPU ranks of one machine."""
    base = ClusterProfile(
        name="local",
        nodes=1,
        gpus_per_node=ranks,
        accelerator="cpu",
        intra_node=LinkConfig(kind="shared-memory"),
        storage=StorageConfig(bandwidth=1e9),
        backend=BackendConfig(kind="local"),
    )
    return replace(base, **changes)


def recipe(
    model: ModelConfig = GPT_175B,
    *,
    batch: int = 512,
    parallel: ParallelConfig | None = None,
    request: RequestConfig | None = None,
    steps: int = 1000,
    **batch_changes: Any,
) -> Recipe:
    """A recipe with automatic everything."""
    return Recipe(
        name="test",
        model=model,
        batch=BatchConfig(global_size=batch, **batch_changes),
        parallel=parallel or ParallelConfig(),
        train=TrainConfig(steps=steps),
        request=request,
    )


def spec(what: Recipe | None = None, where: ClusterProfile | None = None) -> JobSpec:
    """A job spec; the digest plays no part in planning."""
    return JobSpec(recipe=what or recipe(), cluster=where or a100(), digest="")


def parts(what: Recipe, where: ClusterProfile) -> tuple[Workload, Machine]:
    """What the planner's arithmetic works on."""
    return make_workload(what, where.software.framework), make_machine(where)
