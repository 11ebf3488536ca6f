"""Measured runs of later sources (tests/data/later_runs.yaml). The planner's constants were not fitted to
them, except those of Blackwell accelerators; what a source says of its software and network stands beside its
rows."""

from __future__ import annotations

from dataclasses import dataclass, fields
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

FITTED_TO = ("b200", "gb200")
"""Accelerators whose constants these runs were also used for."""
DATA = Path(__file__).resolve().parents[1] / "data" / "later_runs.yaml"
LINKS = {
    "h100-sxm": ("nvlink4", "ib-ndr", 400e9),
    "h100-96g-hbm2e": ("nvlink4", "ib-ndr", 400e9),
    "h200-sxm": ("nvlink4", "ib-ndr", 400e9),
    "b200": ("nvlink5", "ib-ndr", 400e9),
    "gb200": ("nvlink5", "ib-ndr", 400e9),
    "a100-40g-sxm": ("nvlink3", "ib-hdr", 200e9),
    "a100-80g-sxm": ("nvlink3", "ib-hdr", 200e9),
    "a800-80g-sxm": ("nvlink3-a800", "ib-hdr", 200e9),
    "v100-32g-sxm": ("nvlink2", "ib-hdr", 100e9),
}
"""Inside a node, between nodes, bytes/s of a node: those of the DGX systems."""
_DOMAIN = 64
"""GB200 that share one NVLink domain in runs of a power of two."""
_TRAITS = tuple(field.name for field in fields(SoftwareConfig))


@dataclass(frozen=True)
class LaterRun:
    """One measured run."""

    step: MeasuredStep
    reserved: float | None
    """Most bytes that the allocator held, where published."""
    held_out: bool
    """Whether it was written down before the planner had seen its source."""


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
    seconds = row.get("seconds")
    if seconds is None:
        seconds = row["global"] * model.sequence / row["tokens"] / row["gpus"]
    recipe = Recipe(
        name=row["model"],
        model=model,
        batch=BatchConfig(global_size=row["global"], micro=row["micro"]),
        precision=PrecisionConfig(mode=row.get("precision", source["precision"])),
        train=TrainConfig(steps=1),
    )
    step = MeasuredStep(
        recipe=recipe, cluster=_cluster(source, row), layout=_layout(row), seconds=float(seconds)
    )
    reserved = row["reserved_gib"] * 2**30 if "reserved_gib" in row else None
    return LaterRun(step, reserved, source.get("held_out", False))


def _model(shape: dict[str, Any], sequence: int | None) -> ModelConfig:
    return ModelConfig(
        kind=shape["kind"],
        layers=shape["layers"],
        hidden=shape["hidden"],
        heads=shape["heads"],
        kv_heads=shape.get("kv_heads", shape["heads"]),
        head_dim=shape.get("head_dim"),
        ffn_hidden=shape["ffn"],
        vocab=shape["vocab"],
        sequence=sequence or shape["sequence"],
        bias=shape.get("bias", False),
        qk_norm=shape.get("qk_norm", False),
        rope=RopeConfig() if shape.get("rope", True) else None,
        tie_embeddings=shape.get("tied", False),
        experts=shape.get("experts"),
        experts_per_token=shape.get("top"),
    )


def _layout(row: dict[str, Any]) -> Layout:
    tp, pp, cp, vpp = row["tp"], row["pp"], row["cp"], row["vpp"]
    return Layout(
        dp=row["gpus"] // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=vpp,
        ep=row.get("ep", 1),
        zero=row["zero"],
        sequence_parallel=row.get("sequence_parallel", True) and tp > 1,
        micro_batch=row["micro"],
        schedule="interleaved" if vpp > 1 else "1f1b",
        recompute=row["recompute"],
    )


def _cluster(source: dict[str, Any], row: dict[str, Any]) -> ClusterProfile:
    inside, between, bandwidth = LINKS[row["accelerator"]]
    stated = source.get("network", {})
    if "inside" in stated and row["accelerator"] == "h100-sxm":  # an H800 is an H100 with less NVLink
        inside = stated["inside"]
    if "between" in stated:
        between, bandwidth = stated["between"]
    bandwidth = row.get("bandwidth", bandwidth)
    per_node = min(8, row["gpus"])
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
            data=LinkConfig(kind=row.get("link", between), bandwidth=bandwidth),
            control=LinkConfig(kind="tcp"),
        ),
        storage=StorageConfig(bandwidth=50e9),
        backend=BackendConfig(kind="slurm"),
        software=SoftwareConfig(
            **{**source["software"], **{name: row[name] for name in _TRAITS if name in row}}
        ),
    )


def _own_traits(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says of its software itself."""
    return {name: row[name] for name in _TRAITS if name in row}
