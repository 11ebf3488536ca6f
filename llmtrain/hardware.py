"""Accelerators and links in numbers: the one table that a cluster profile's names point into.

Peaks are dense (no structured sparsity), FLOP/s; memory in bytes (10^9 based, as sold); bandwidths in
bytes/s, one direction. Peaks, memory and bandwidths are the vendors' figures. Ceilings and efficiencies are
what whole training steps reach: fitted jointly to published runs (tests/bench/planner_accuracy.py); `profiles
calibrate` replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator."""

    name: str
    """Name in a profile, lower-case."""
    title: str
    """Name in a table."""
    bf16_flops: float
    """Dense BF16 or FP16 matrix peak, FLOP/s (FP16 where BF16 is missing)."""
    fp8_flops: float = 0.0
    """Dense FP8 peak; 0: the format is missing."""
    tf32_flops: float = 0.0
    """Dense TF32 peak; 0: FP32 rate is used."""
    fp32_flops: float
    """FP32 peak outside matrix units."""
    memory: float
    """Device memory, bytes."""
    memory_bandwidth: float
    """Device memory bandwidth, bytes/s."""
    multiprocessors: int
    """Units that work on output tiles side by side."""
    gemm_ceiling: float
    """Share of the peak that a large GEMM sustains inside a training step."""
    fp8_ceiling: float = 0.0
    """The same for FP8."""
    memory_efficiency: float = 0.90
    """Share of `memory_bandwidth` that streaming kernels reach."""
    attention: tuple[float, float, float] = (0.427, 0.50, 0.52)
    """Share of the peak that long causal attention reaches forward, FLOPs of half the square: flash1,
    flash2, flash3.
    """
    launch_gap: float = 3e-6
    """Seconds from the end of one kernel to the start of the next."""
    context: float = 3.5 * GB
    """Bytes that the driver, the libraries and communication buffers take."""

    def peak(self, mode: str) -> float:
        """Matrix peak of a precision mode, FLOP/s; raises KeyError for an unknown mode, ValueError for a
        missing format.
        """
        if mode == "fp8" and not self.fp8_flops:
            raise ValueError(f"{self.title} has no FP8 matrix units")
        table = {"bf16": self.bf16_flops, "fp16": self.bf16_flops, "fp8": self.fp8_flops}
        table |= {"tf32": self.tf32_flops or self.fp32_flops, "fp32": self.fp32_flops}
        return table[mode]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link."""

    name: str
    """Name in a profile, lower-case."""
    title: str
    """Name in a table."""
    bandwidth: float
    """Bytes/s, one direction: per accelerator (inside a node) or per port (between nodes)."""
    efficiency: float
    """Share of `bandwidth` that large collectives reach (bus bandwidth)."""
    latency: float
    """Seconds before the first byte of a collective: software and first hop."""
    hop: float
    """Seconds that each further step of a ring takes."""
    inside_node: bool
    """Whether it connects accelerators of one node."""


def _gpu(name: str, title: str, **figures: Any) -> Accelerator:
    return Accelerator(name=name, title=title, **figures)


_AMPERE = {"bf16_flops": 312e12, "tf32_flops": 156e12, "fp32_flops": 19.5e12, "multiprocessors": 108}
_HOPPER = {
    "bf16_flops": 989.4e12,
    "fp8_flops": 1978.9e12,
    "tf32_flops": 494.7e12,
    "fp32_flops": 66.9e12,
    "multiprocessors": 132,
    "gemm_ceiling": 0.75,
    "fp8_ceiling": 0.767,
    "attention": (0.226, 0.31, 0.567),
    "memory_efficiency": 0.863,
    "launch_gap": 8.9e-6,
}
_POWER_CAPPED = {
    "gemm_ceiling": 0.58,
    "fp8_ceiling": 0.59,
    "attention": (0.22, 0.31, 0.56),
    "memory_efficiency": 0.75,
}
_BLACKWELL = {
    "fp32_flops": 80e12,
    "multiprocessors": 148,
    "memory_efficiency": 0.875,
    "launch_gap": 1e-6,
}
"""The ceilings of the two Blackwells differ with the software they were measured under: BF16 on B200 is plain
Megatron-LM on single nodes, on GB200 a tuned container. In FP8 both come from the same releases and reach the
same 3.0 PFLOP/s, which is the smaller share of GB200's higher peak."""

_ZEN4_CORE = {
    "bf16_flops": 2.3e11,
    "tf32_flops": 1.1e11,
    "fp32_flops": 1.1e11,
    "memory_bandwidth": 40e9,
    "gemm_ceiling": 0.90,
    "attention": (0.174, 0.174, 0.174),
    "memory_efficiency": 0.62,
    "launch_gap": 11e-6,
}
"""A core with BF16 products (AVX-512 BF16), as torch 2.13 uses it, by this package's micro-benchmark. Without
those products torch reaches a fifth of that rate in BF16, without AVX-512 a hundredth: what a profile's
calibration says counts."""

ACCELERATORS: dict[str, Accelerator] = {
    entry.name: entry
    for entry in (
        _gpu(
            "v100-32g-sxm",
            "V100-SXM2-32GB",
            bf16_flops=125e12,
            fp32_flops=15.7e12,
            memory=32 * GB,
            memory_bandwidth=900e9,
            multiprocessors=80,
            gemm_ceiling=0.75,
            memory_efficiency=0.80,
        ),
        _gpu(
            "a100-40g-sxm",
            "A100-SXM4-40GB",
            **_AMPERE,
            memory=40 * GB,
            memory_bandwidth=1555e9,
            gemm_ceiling=0.822,
        ),
        _gpu(
            "a100-80g-sxm",
            "A100-SXM4-80GB",
            **_AMPERE,
            memory=80 * GB,
            memory_bandwidth=2039e9,
            gemm_ceiling=0.822,
        ),
        _gpu(
            "a100-40g-pcie",
            "A100-PCIe-40GB",
            **_AMPERE,
            memory=40 * GB,
            memory_bandwidth=1555e9,
            gemm_ceiling=0.74,
        ),
        _gpu(
            "a100-80g-pcie",
            "A100-PCIe-80GB",
            **_AMPERE,
            memory=80 * GB,
            memory_bandwidth=1935e9,
            gemm_ceiling=0.74,
        ),
        _gpu(
            "a800-80g-sxm",
            "A800-SXM4-80GB",
            **_AMPERE,
            memory=80 * GB,
            memory_bandwidth=2039e9,
            gemm_ceiling=0.822,
        ),
        _gpu("h100-sxm", "H100-SXM5-80GB", **_HOPPER, memory=80 * GB, memory_bandwidth=3352e9),
        _gpu(
            "h100-96g-hbm2e",
            "H100-SXM5-96GB (HBM2e, 500 W)",
            **(_HOPPER | _POWER_CAPPED),
            memory=96 * GB,
            memory_bandwidth=2400e9,
        ),
        _gpu("h200-sxm", "H200-SXM5-141GB", **_HOPPER, memory=141 * GB, memory_bandwidth=4800e9),
        _gpu(
            "b200",
            "B200-SXM-180GB",
            **_BLACKWELL,
            bf16_flops=2250e12,
            fp8_flops=4500e12,
            tf32_flops=1125e12,
            gemm_ceiling=0.518,
            fp8_ceiling=0.67,
            attention=(0.15, 0.25, 0.51),
            memory=180 * GB,
            memory_bandwidth=8000e9,
        ),
        _gpu(
            "gb200",
            "GB200-NVL72-186GB",
            **_BLACKWELL,
            bf16_flops=2450e12,
            fp8_flops=4900e12,
            tf32_flops=1225e12,
            gemm_ceiling=0.60,
            fp8_ceiling=0.605,
            attention=(0.15, 0.25, 0.56),
            memory=186 * GB,
            memory_bandwidth=8000e9,
        ),
        _gpu(
            "cpu",
            "CPU (one rank)",
            **_ZEN4_CORE,
            memory=4 * GB,
            multiprocessors=1,
            context=0.35 * GB,
        ),
    )
}


def _link(name: str, title: str, *figures: float, inside: bool) -> Link:
    bandwidth, efficiency, latency, hop = figures
    return Link(
        name=name,
        title=title,
        bandwidth=bandwidth,
        efficiency=efficiency,
        latency=latency,
        hop=hop,
        inside_node=inside,
    )


LINKS: dict[str, Link] = {
    entry.name: entry
    for entry in (
        _link("nvlink2", "NVLink 2", 150e9, 0.80, 20e-6, 3.4e-6, inside=True),
        _link("nvlink3", "NVLink 3", 300e9, 0.80, 18e-6, 3.4e-6, inside=True),
        _link("nvlink3-a800", "NVLink 3 of an A800", 200e9, 0.80, 18e-6, 3.4e-6, inside=True),
        _link("nvlink4", "NVLink 4", 450e9, 0.83, 16e-6, 2.4e-6, inside=True),
        _link("nvlink4-h800", "NVLink 4 of an H800", 200e9, 0.83, 16e-6, 2.4e-6, inside=True),
        _link("nvlink5", "NVLink 5", 900e9, 0.64, 16e-6, 2.4e-6, inside=True),
        _link("pcie4", "PCIe 4.0 x16", 32e9, 0.72, 20e-6, 5.7e-6, inside=True),
        _link("pcie5", "PCIe 5.0 x16", 64e9, 0.72, 20e-6, 5.7e-6, inside=True),
        _link("shared-memory", "shared memory", 0.75e9, 0.75, 40e-6, 20e-6, inside=True),
        _link("ib-hdr", "InfiniBand HDR, 200 Gb/s", 25e9, 0.90, 14e-6, 9.6e-6, inside=False),
        _link("ib-ndr", "InfiniBand NDR, 400 Gb/s", 50e9, 0.70, 14e-6, 9.6e-6, inside=False),
        _link("roce", "RoCE v2, 400 Gb/s", 50e9, 0.80, 18e-6, 12e-6, inside=False),
        _link("tcp", "TCP over Ethernet, 25 Gb/s", 3.125e9, 0.75, 60e-6, 40e-6, inside=False),
    )
}
