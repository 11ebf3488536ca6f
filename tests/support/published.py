"""Published runs as (workload, machine, layout, measurement): every row through what a user's profile could
state.

The traits of each group below are statements about its software and its network, read in the group's source
or, where it is silent, inferred: a fused loss of torchtitan's H200 rows from their date, full recomputation
of dgxc rows that would not fit by far without. No row has a constant fitted to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.cluster import (
    BackendConfig,
    CalibrationConfig,
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
from llmtrain.plan.machine import make_machine
from llmtrain.plan.memory.model import MemoryModel
from llmtrain.plan.workload import make_workload

_SURELY_FULL = 1.3
"""Memory needed, against the device's, from which no error of the prediction can be the reason."""
DATA = Path(__file__).resolve().parents[1] / "data" / "published_runs.yaml"

ACCELERATORS = {
    "A100-SXM4-80GB": "a100-80g-sxm",
    "A100-80GB": "a100-80g-sxm",
    "A100-40GB": "a100-40g-sxm",
    "A100": "a100-80g-sxm",
    "A800-80GB": "a800-80g-sxm",
    "H100": "h100-sxm",
    "H100-96GB-HBM2e": "h100-96g-hbm2e",
    "H100-94GB-HBM2e": "h100-96g-hbm2e",
    "H200-SXM5-141GB": "h200-sxm",
    "B200": "b200",
    "GB200": "gb200",
}
NVLINK = {
    "a1": "nvlink3",
    "a8": "nvlink3-a800",
    "h1": "nvlink4",
    "h2": "nvlink4",
    "b2": "nvlink5",
    "gb": "nvlink5",
}

PLAIN = SoftwareConfig(
    attention="flash2",
    fused_kernels=False,
    fused_loss=False,
    dropout=False,
    gradients="fp32",
    fused_optimizer=True,
    overlap_gradients=True,
    overlap_weights=False,
    overlap_pipeline=False,
    selective_recompute="attention",
    fp8_scaling="delayed",
    fp8_gather=False,
    shard_within_node=False,
    pipeline_scatter=False,
    overlap_tensor=0.0,
)
"""What every group below says of a trait that it does not name: nothing is left to the planner's guess."""
MEGATRON_2021 = replace(
    PLAIN,
    framework="megatron",
    attention="unfused",
    fused_kernels=True,
    dropout=True,
    gradients="bf16",
    fused_optimizer=False,
    pipeline_scatter=True,
    overlap_gradients=False,
)
MEGATRON_DEEPSPEED = replace(MEGATRON_2021, framework="deepspeed")
NEMO = replace(
    PLAIN,
    framework="megatron",
    attention="flash3",
    fused_kernels=True,
    gradients="bf16",
    overlap_gradients=True,
    overlap_weights=True,
    overlap_pipeline=True,
    overlap_tensor=0.5,
)
FSDP = replace(PLAIN, framework="fsdp", overlap_weights=True)
SOFTWARE: dict[str, SoftwareConfig] = {
    "korthikanti2022": MEGATRON_2021,
    "sc21_megatron": MEGATRON_2021,
    "megatron_readme_2021_01": MEGATRON_2021,
    "bigscience_a100": MEGATRON_DEEPSPEED,
    "vtrain_multi_node": MEGATRON_DEEPSPEED,
    "zero_bubble": MEGATRON_2021,
    "simumax_b200": replace(
        PLAIN, framework="megatron", attention="flash3", fused_kernels=True, overlap_gradients=False
    ),
    "dgxc_benchmarking": NEMO,
    "torchtitan": FSDP,
    "llm_foundry": replace(FSDP, attention="flash1"),
    # its ZeRO optimizer sends fixed buckets, as DeepSpeed's does
    "internevo": replace(PLAIN, framework="deepspeed", gradients="bf16"),
    "nanotron": replace(PLAIN, framework="deepspeed", overlap_gradients=False),
}
NODE_BANDWIDTH = {
    "korthikanti2022": ("ib-hdr", 200e9),
    "sc21_megatron": ("ib-hdr", 200e9),
    "megatron_readme_2021_01": ("ib-hdr", 200e9),
    "bigscience_a100": ("omni-path", 50e9),
    "vtrain_multi_node": ("ib-hdr", 100e9),
    "zero_bubble": ("roce", 100e9),
    "simumax_b200": ("ib-ndr", 400e9),
    "dgxc_benchmarking": ("ib-ndr", 400e9),
    "torchtitan": ("ib-ndr", 400e9),
    "llm_foundry": ("roce", 200e9),
    "internevo": ("roce", 50e9),
    "nanotron": ("ib-ndr", 400e9),
}
INSIDE_NODE = {"bigscience_a100": 100e9}
"""Bytes/s between two accelerators of a node where it is less than the full NVLink: "NVLink 4 inter-gpu
connects" of 25 GB/s each (train/tr11-176B-ml/README.md of bigscience)."""

BLOCKING_LAUNCHES = 15e-6
"""Seconds between kernels where CUDA_LAUNCH_BLOCKING=1 has the host launch one only after the last: about 5
of launch, 10 of waking up and of the framework. Runs of bigscience on 320 and more GPUs hung without it
("dealing with JZ hanging", train/tr11-176B-ml/chronicles-prequel.md)."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    group: str
    tier: str
    suspect: bool
    config_key: str
    recipe: Recipe
    cluster: ClusterProfile
    layout: Layout
    seconds: float | None
    memory: float | None
    """Bytes, as published."""
    memory_definition: str | None
    memory_by_rank: tuple[float, ...]
    raw: dict[str, Any]


@lru_cache(maxsize=1)
def raw_rows() -> tuple[dict[str, Any], ...]:
    """All rows of the data file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load(DATA.read_text(encoding="utf-8"), Loader=loader)
    return tuple(document["runs"])


def rows(*groups: str) -> list[Row]:
    """Rows of some groups (all without arguments) whose shape the planner can express."""
    found = (to_row(raw) for raw in raw_rows() if not groups or raw["group"] in groups)
    return [_that_fits(row) for row in found if row is not None]


def _that_fits(row: Row) -> Row:
    """A row whose source does not tell whether it recomputes, and which can only have run if it does: it then
    recomputes in full."""
    if row.raw["recompute"] or row.layout.recompute != "none" or row.tier == "A":
        return row
    machine = make_machine(row.cluster)
    model = MemoryModel(make_workload(row.recipe, machine.software.framework), machine)
    micro_batches = row.layout.micro_batches(row.recipe.batch.global_size)[0]
    if model.need(row.layout, micro_batches) <= _SURELY_FULL * machine.capacity:
        return row
    return replace(row, layout=replace(row.layout, recompute="full"))


def _value(raw: dict[str, Any], section: str, name: str) -> Any:
    stated = (raw[section] or {}).get(name)
    if stated is not None:
        return stated
    derived = (raw["derived"] or {}).get(name)
    return derived["value"] if derived else None


def to_row(raw: dict[str, Any]) -> Row | None:
    """Convert one row; None when it lacks what the planner needs or has a shape that a recipe cannot say."""
    model = _model(raw)
    layout = _layout(raw)
    if model is None or layout is None:
        return None
    measured = raw["measured"]
    memory = measured.get("memory_gb_per_gpu")
    unit = 2**30 if "GiB" in (measured.get("memory_definition") or "") else 1e9
    batch = raw["batch"]["global"] or layout.micro_batch * layout.dp * (raw["batch"]["grad_accum"] or 1)
    return Row(
        id=raw["id"],
        group=raw["group"],
        tier=raw["tier"],
        suspect=raw["suspect"],
        config_key=raw["config_key"],
        recipe=Recipe(
            name=raw["id"],
            model=model,
            batch=BatchConfig(global_size=batch, micro=layout.micro_batch),
            precision=PrecisionConfig(mode=raw["precision"] or "fp16"),
            train=TrainConfig(steps=1),
        ),
        cluster=_cluster(raw),
        layout=layout,
        seconds=_value(raw, "measured", "step_time_s"),
        memory=memory * unit if memory else None,
        memory_definition=measured.get("memory_definition"),
        memory_by_rank=tuple(m * 2**20 for m in measured.get("peak_allocated_mib_by_rank") or ()),
        raw=raw,
    )


def _model(raw: dict[str, Any]) -> ModelConfig | None:
    model = raw["model"]
    layers = _value(raw, "model", "layers")
    if not layers or not model["heads"] or not model["seq"] or model.get("attention") == "MLA":
        return None
    if model.get("experts") and model.get("dense_layers"):
        return None
    gated = bool(model["gated_mlp"])
    moe = bool(model.get("experts"))
    kind = "moe" if moe else ("llama" if gated else "gpt")
    rotary = gated or (raw["group"] == "dgxc_benchmarking" and "gpt3" not in raw["id"])
    vocab = _value(raw, "model", "vocab") or 51200
    return ModelConfig(
        kind=kind,
        layers=int(layers),
        hidden=model["hidden"],
        heads=model["heads"],
        kv_heads=model["kv_heads"] or model["heads"],
        ffn_hidden=_value(raw, "model", "ffn_hidden") or 4 * model["hidden"],
        vocab=-(-vocab // 128) * 128,
        sequence=model["seq"],
        activation="swiglu" if gated else "gelu",
        bias=not gated and raw["group"] not in ("llm_foundry", "dgxc_benchmarking"),
        rope=RopeConfig() if rotary else None,
        tie_embeddings=None if raw["group"] != "dgxc_benchmarking" else False,
        experts=model.get("experts"),
        experts_per_token=model.get("topk"),
    )


def _zero(raw: dict[str, Any]) -> int:
    stated = str(raw["parallel"]["zero_stage_or_fsdp"] or "").lower()
    if "shard_grad_op" in stated:
        return 2
    if "zero3" in stated or "fsdp" in stated or "full_shard" in stated:
        return 3
    if stated in ("0",):
        return 0
    if stated in ("1",) or "zero1" in stated or "zero-1" in stated:
        return 1
    return {"dgxc_benchmarking": 1, "nanotron": 0}.get(raw["group"], 0)


def _layout(raw: dict[str, Any]) -> Layout | None:
    parallel, hardware = raw["parallel"], raw["hardware"]
    tp, pp = _value(raw, "parallel", "tp"), _value(raw, "parallel", "pp")
    vpp = _value(raw, "parallel", "vpp") or 1
    if raw["id"].startswith("sc21-t2-ptd"):  # the paper's text: tensor 8 inside a node, interleaving for 530B
        tp, pp, vpp = (8, 12, 1) if "175b" in raw["id"] else (8, 35, 3)
    if "VP column is NA in this release; 12 in" in (raw["notes"] or ""):
        vpp = 12
    micro = raw["batch"]["micro"]
    if not tp or not pp or not micro:
        return None
    cp = parallel["cp"] or 1
    if (
        parallel.get("schedule") == "ZB-2p"
    ):  # twice the activations of 1F1B: not one of the planner's schedules
        return None
    schedule = {"ZB-1p": "zero-bubble"}.get(str(parallel.get("schedule")), "1f1b")
    if vpp > 1:
        schedule = "interleaved"
    sequence_parallel = parallel["sp"]
    if sequence_parallel is None:
        sequence_parallel = bool(_value(raw, "parallel", "sp")) or raw["group"] in ("dgxc_benchmarking",)
    recompute = raw["recompute"] or (raw["derived"] or {}).get("recompute", {}).get("value") or "none"
    if raw["group"] == "sc21_megatron":  # its estimate of FLOPs counts recomputation in all runs
        recompute = "full"
    return Layout(
        dp=hardware["gpus"] // (tp * pp * cp),
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=parallel["ep"] or 1,
        zero=_zero(raw),  # type: ignore[arg-type]
        sequence_parallel=bool(sequence_parallel) and tp > 1,
        micro_batch=micro,
        schedule=schedule,  # type: ignore[arg-type]
        recompute=recompute,
    )


def software(raw: dict[str, Any]) -> SoftwareConfig:
    """What the row's source says about its software."""
    base = SOFTWARE[raw["group"]]
    notes = raw["notes"] or ""
    changes: dict[str, Any] = {}
    if raw["group"] == "torchtitan":
        changes["fused_kernels"] = "compile" in notes and "compile off" not in notes
        if "async" in notes or "async" in raw["id"]:
            changes["overlap_tensor"] = 0.5
        changes["selective_recompute"] = "alternate-layers" if "every second layer" in notes else "operators"
        changes["fused_loss"] = "h200" in raw["id"]  # torch.compile of the loss came in 2025
        changes["fp8_scaling"] = "row" if "rowwise" in raw["id"] else "tensor"
        changes["fp8_gather"] = changes["fp8_scaling"] == "tensor"
    if raw["id"].startswith("sc21-t2-z3"):
        changes["framework"] = "deepspeed"
    if raw["group"] == "internevo":
        changes["shard_within_node"] = "over all" not in str(raw["parallel"]["zero_stage_or_fsdp"])
    if raw["group"] == "llm_foundry" and "PURE" in notes:
        changes["gradients"] = "bf16"
    if raw["group"] == "bigscience_a100" and raw["precision"] == "bf16":
        changes["gradients"] = "fp32"
    return replace(base, **changes)


def _cluster(raw: dict[str, Any], calibration: CalibrationConfig | None = None) -> ClusterProfile:
    hardware = raw["hardware"]
    accelerator = ACCELERATORS[hardware["gpu"]]
    per_node = hardware["gpus_per_node"] or 8
    link, bandwidth = NODE_BANDWIDTH[raw["group"]]
    if accelerator == "gb200":
        per_node = min(72, hardware["gpus"])  # one NVLink domain
        per_node = 64 if hardware["gpus"] >= 64 else hardware["gpus"]
        bandwidth = 50e9 * per_node
    return ClusterProfile(
        name=raw["group"],
        nodes=-(-hardware["gpus"] // per_node),
        gpus_per_node=per_node,
        accelerator=accelerator,
        intra_node=LinkConfig(kind=NVLINK[accelerator[:2]], bandwidth=INSIDE_NODE.get(raw["group"])),
        inter_node=InterNodeConfig(
            data=LinkConfig(kind=link, bandwidth=bandwidth),
            control=LinkConfig(kind="tcp"),
        ),
        storage=StorageConfig(bandwidth=50e9),
        backend=BackendConfig(kind="slurm"),
        software=software(raw),
        calibration=calibration or CalibrationConfig(launch_gap=_launch_gap(raw)),
    )


def _launch_gap(raw: dict[str, Any]) -> float | None:
    blocks = raw["group"] == "bigscience_a100" and raw["hardware"]["gpus"] >= 320
    return BLOCKING_LAUNCHES if blocks else None
