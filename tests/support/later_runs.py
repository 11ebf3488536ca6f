"""Measured runs of later sources (tests/data/later_runs.yaml). The planner's constants were not fitted to
them, except those of Blackwell accelerators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.cluster import (
    BackendConfig,
    ClusterProfile,
    InterNodeConfig,
    LinkConfig,
    SoftwareConfig,
    StorageConfig,
)
from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig, RopeConfig
from llmtrain.config.numerics import PrecisionConfig
from llmtrain.config.recipe import BatchConfig, Recipe, TrainConfig
from llmtrain.plan.calibrate import MeasuredStep
from tests.support.published import FSDP, NEMO

FITTED_TO = ("b200", "gb200")
"""Accelerators whose constants these runs were also used for."""
DATA = Path(__file__).resolve().parents[1] / "data" / "later_runs.yaml"
LINKS = {
    "h100-sxm": ("nvlink4", "ib-ndr", 400e9),
    "h100-96g-hbm2e": ("nvlink4", "ib-ndr", 400e9),
    "b200": ("nvlink5", "ib-ndr", 400e9),
    "gb200": ("nvlink5", "ib-ndr", 400e9),
    "a100-80g-sxm": ("nvlink3", "ib-hdr", 200e9),
}
"""Inside a node, between nodes, bytes/s of a node: those of the DGX systems."""
_DOMAIN = 64
"""GB200 that share one NVLink domain in runs of a power of two."""


@dataclass(frozen=True)
class LaterRun:
    """One measured run."""

    step: MeasuredStep
    reserved: float | None
    """Most bytes that the allocator held, where published."""


def later_runs() -> dict[str, list[LaterRun]]:
    """Runs by source."""
    document = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return {
        source["name"]: [
            _run(source, document["models"], dict(zip(source["columns"], row, strict=True)))
            for row in source["rows"]
        ]
        for source in document["sources"]
    }


def _run(source: dict[str, Any], models: dict[str, Any], row: dict[str, Any]) -> LaterRun:
    model = _model(models[row["model"]], row.get("sequence"))
    tokens = row["global"] * model.sequence
    recipe = Recipe(
        name=row["model"],
        model=model,
        batch=BatchConfig(global_size=row["global"], micro=row["micro"]),
        precision=PrecisionConfig(mode=source["precision"]),
        train=TrainConfig(steps=1),
    )
    step = MeasuredStep(
        recipe=recipe,
        cluster=_cluster(source, row),
        layout=_layout(row),
        seconds=tokens / row["tokens"] / row["gpus"],
    )
    return LaterRun(step, row["reserved_gib"] * 2**30 if "reserved_gib" in row else None)


def _model(shape: dict[str, Any], sequence: int | None) -> ModelConfig:
    is_gpt3 = shape["kind"] == "gpt" and shape["vocab"] == 51200
    return ModelConfig(
        kind=shape["kind"],
        layers=shape["layers"],
        hidden=shape["hidden"],
        heads=shape["heads"],
        kv_heads=shape.get("kv_heads", shape["heads"]),
        ffn_hidden=shape["ffn"],
        vocab=shape["vocab"],
        sequence=sequence or shape["sequence"],
        bias=False,
        rope=None if is_gpt3 else RopeConfig(),
        tie_embeddings=False,
    )


def _layout(row: dict[str, Any]) -> Layout:
    tp, pp, cp, vpp = row["tp"], row["pp"], row["cp"], row["vpp"]
    return Layout(
        dp=row["gpus"] // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=vpp,
        zero=row["zero"],
        sequence_parallel=tp > 1,
        micro_batch=row["micro"],
        schedule="interleaved" if vpp > 1 else "1f1b",
        recompute=row["recompute"],
    )


def _cluster(source: dict[str, Any], row: dict[str, Any]) -> ClusterProfile:
    inside, between, bandwidth = LINKS[row["accelerator"]]
    per_node = 8
    if row["accelerator"] == "gb200":
        per_node = min(_DOMAIN, row["gpus"])
        bandwidth *= per_node / 8
    return ClusterProfile(
        name=source["name"],
        nodes=row["gpus"] // per_node,
        gpus_per_node=per_node,
        accelerator=row["accelerator"],
        intra_node=LinkConfig(kind=inside),
        inter_node=InterNodeConfig(
            data=LinkConfig(kind=between, bandwidth=bandwidth), control=LinkConfig(kind="tcp")
        ),
        storage=StorageConfig(bandwidth=50e9),
        backend=BackendConfig(kind="slurm"),
        software=_software(source, row),
    )


def _software(source: dict[str, Any], row: dict[str, Any]) -> SoftwareConfig:
    if source["software"] == "fsdp":
        return replace(FSDP, shard_within_node=row["within_node"])
    if source["software"] == "torchtitan":
        return replace(
            FSDP,
            fused_kernels=True,
            selective_recompute="operators",
            fp8_scaling=source["fp8_scaling"],
            fp8_gather=True,
        )
    return replace(NEMO, fp8_scaling=source["fp8_scaling"])
