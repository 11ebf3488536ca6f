"""What training software does, settled: what a profile says of it, and what it leaves open as the named
framework usually does it on that generation of accelerators."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from llmtrain.config.cluster import SoftwareConfig
from llmtrain.hardware import Accelerator

_AMPERE, _HOPPER = 200e12, 500e12
"""Least FLOP/s in BF16 of accelerators that flash attention runs on, and of those whose frameworks are tuned
for large clusters by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """`SoftwareConfig` with nothing left open; the defaults are this package's own engine."""

    framework: Literal["llmtrain", "megatron", "deepspeed", "fsdp"] = "llmtrain"
    attention: Literal["flash1", "flash2", "flash3", "unfused"] = "flash2"
    fused_kernels: bool = False
    fused_loss: bool = False
    dropout: bool = False
    gradients: Literal["fp32", "bf16"] = "fp32"
    fused_optimizer: bool = True
    overlap_gradients: bool = True
    overlap_weights: bool = False
    overlap_pipeline: bool = False
    selective_recompute: Literal["attention", "operators", "alternate-layers"] = "attention"
    fp8_scaling: Literal["delayed", "tensor", "row"] = "delayed"
    fp8_gather: bool = False
    shard_within_node: bool = False
    pipeline_scatter: bool = False
    overlap_tensor: float = 0.2


_MEGATRON = Software(
    framework="megatron",
    fused_kernels=True,
    overlap_gradients=False,
    pipeline_scatter=True,
    overlap_tensor=0.0,
)
"""Megatron-LM without a flag for any overlap."""
_DEEPSPEED = Software(
    framework="deepspeed", fused_kernels=True, gradients="bf16", pipeline_scatter=True, overlap_tensor=0.0
)
"""DeepSpeed reduces gradients in the format of the weights, beside the backward pass."""
_FSDP = Software(
    framework="fsdp",
    overlap_weights=True,
    selective_recompute="operators",
    fp8_scaling="tensor",
    fp8_gather=True,
    overlap_tensor=0.0,
)
"""PyTorch's sharding as it comes: gathered ahead, kernels one by one."""
_USUAL = {"llmtrain": Software(), "megatron": _MEGATRON, "deepspeed": _DEEPSPEED, "fsdp": _FSDP}


def usual(framework: str, accelerator: Accelerator) -> Software:
    """What a framework does where nobody says otherwise.

    Before Ampere there is no flash attention. On Hopper and later, Megatron-Core's recipes run cuDNN's
    attention and hide what traffic they can (of tensor parallelism half in most of them, nothing in some),
    and what PyTorch shards is compiled.
    """
    found = _USUAL[framework]
    if framework == "llmtrain":
        return found
    if accelerator.bf16_flops < _AMPERE:
        return replace(found, attention="unfused")
    if accelerator.bf16_flops < _HOPPER:
        return found
    if framework == "megatron":
        return replace(
            found,
            attention="flash3",
            overlap_gradients=True,
            overlap_weights=True,
            overlap_pipeline=True,
            overlap_tensor=0.3,
        )
    return replace(found, fused_kernels=True)


def settle(stated: SoftwareConfig, accelerator: Accelerator) -> Software:
    """A profile's statements, completed."""
    open_ones = usual(stated.framework, accelerator)
    said = {field.name: getattr(stated, field.name) for field in fields(Software)}
    return replace(open_ones, **{name: value for name, value in said.items() if value is not None})
