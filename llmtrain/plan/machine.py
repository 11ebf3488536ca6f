"""The machine that the planner calculates with: a cluster profile joined with the hardware table.

Bandwidths in bytes/s, times in seconds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from llmtrain.config.cluster import ClusterProfile, LinkConfig
from llmtrain.errors import ConfigError, Problem
from llmtrain.hardware import ACCELERATORS, LINKS, Accelerator, Link
from llmtrain.plan.software import Software, settle

CPU = "cpu"
_CORES = 2.0
"""Cores assumed under CPU ranks until `profiles calibrate` has counted them: those of a small laptop."""
_STEP_OVERHEAD = 0.01
_STEP_OVERHEAD_ON_CPU = 0.005
_FREE_LINK_EFFICIENCY = 0.85
"""Share of a link's stated bandwidth when the table does not know the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """What one accelerator (inside a node) or one node (between nodes) can move."""

    bus: float
    """Bytes/s that collectives reach in one direction."""
    latency: float
    """Seconds before the first byte."""
    hop: float
    """Seconds a further ring step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything about the cluster that the planner's arithmetic needs."""

    nodes: int
    gpus_per_node: int
    accelerator: Accelerator
    capacity: float
    """Bytes of device memory a rank may use, before any reserve."""
    context: float
    """Bytes taken before the first tensor is made."""
    gemm: float
    """Share of the matrix peak that large GEMMs sustain."""
    fp8: float
    """Factor on the rate of FP8 products."""
    attention: float
    """Factor on the rate of fused attention kernels."""
    memory_bandwidth: float
    """Bytes/s that streaming kernels reach."""
    launch_gap: float
    step_overhead: float
    """Seconds of each step that belong to no layer."""
    intra: LinkSpeed
    inter: LinkSpeed | None
    software: Software
    host_memory: float | None
    cores: float
    """Processor cores that a node's CPU ranks share; infinite on accelerators."""

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are CPU processes."""
        return self.accelerator.name == CPU


def make_machine(cluster: ClusterProfile) -> Machine:
    """Join a profile with the hardware table; raises ConfigError with every figure that cannot be used."""
    problems = list(_problems(cluster))
    if problems:
        raise ConfigError(problems)
    accelerator = _accelerator(cluster)
    calibration = cluster.calibration
    capacity = accelerator.memory
    if accelerator.name == CPU and cluster.host_memory:
        capacity = cluster.host_memory / cluster.gpus_per_node
    intra = _link_speed(cluster.intra_node, calibration.intra_node)
    inter = None
    if cluster.inter_node is not None:
        inter = _link_speed(cluster.inter_node.data, calibration.inter_node)
    streaming = _default(calibration.memory_bandwidth, accelerator.memory_efficiency)
    return Machine(
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        accelerator=accelerator,
        capacity=capacity,
        context=accelerator.context,
        gemm=_default(calibration.gemm, accelerator.gemm_ceiling),
        fp8=_default(calibration.fp8, 1.0),
        attention=_default(calibration.attention, 1.0),
        memory_bandwidth=accelerator.memory_bandwidth * streaming,
        launch_gap=_default(calibration.launch_gap, accelerator.launch_gap),
        step_overhead=_default(
            calibration.step_overhead, _STEP_OVERHEAD_ON_CPU if accelerator.name == CPU else _STEP_OVERHEAD
        ),
        intra=intra,
        inter=inter,
        software=settle(cluster.software, accelerator),
        host_memory=cluster.host_memory,
        cores=_default(calibration.cores, _CORES) if accelerator.name == CPU else float("inf"),
    )


def _default(value: float | None, fallback: float) -> float:
    return fallback if value is None else value


def _accelerator(cluster: ClusterProfile) -> Accelerator:
    chosen = cluster.accelerator
    if isinstance(chosen, str):
        return ACCELERATORS[chosen]
    like = min(ACCELERATORS.values(), key=lambda entry: abs(entry.bf16_flops - chosen.peak_flops))
    return Accelerator(
        name=chosen.name,
        title=chosen.name,
        bf16_flops=chosen.peak_flops,
        fp32_flops=chosen.peak_flops / 16,
        memory=chosen.memory,
        memory_bandwidth=chosen.memory_bandwidth,
        multiprocessors=like.multiprocessors,
        gemm_ceiling=like.gemm_ceiling,
        memory_efficiency=like.memory_efficiency,
        launch_gap=like.launch_gap,
        context=like.context,
    )


def _link_speed(link: LinkConfig, factor: float | None) -> LinkSpeed:
    known = LINKS.get(link.kind)
    bandwidth = link.bandwidth if link.bandwidth is not None else _known(known).bandwidth
    latency = link.latency if link.latency is not None else (known.latency if known else 20e-6)
    efficiency = known.efficiency if known else _FREE_LINK_EFFICIENCY
    return LinkSpeed(
        bus=bandwidth * efficiency * (1.0 if factor is None else factor),
        latency=latency,
        hop=known.hop if known else latency / 2,
    )


def _known(link: Link | None) -> Link:
    if link is None:  # ruled out by _problems
        raise ValueError("link without bandwidth")
    return link


def _problems(cluster: ClusterProfile) -> Iterable[Problem]:
    for name, count in (("nodes", cluster.nodes), ("gpus_per_node", cluster.gpus_per_node)):
        if count < 1:
            yield Problem(f"cluster.{name}", f"{name} is {count}, must be at least 1")
    if cluster.spares >= cluster.nodes:
        yield Problem(
            "cluster.spares", f"spares={cluster.spares} leaves none of nodes={cluster.nodes} to train"
        )
    yield from _accelerator_problems(cluster)
    yield from _link_problems("cluster.intra_node", cluster.intra_node)
    if cluster.inter_node is not None:
        yield from _link_problems("cluster.inter_node.data", cluster.inter_node.data)
    elif cluster.nodes > 1:
        yield Problem(
            "cluster.inter_node",
            f"nodes={cluster.nodes} > 1, but no link between nodes is given",
            "add inter_node: {data: {kind: ib-hdr}, control: {kind: tcp}}",
        )


def _accelerator_problems(cluster: ClusterProfile) -> Iterable[Problem]:
    chosen = cluster.accelerator
    if isinstance(chosen, str):
        if chosen not in ACCELERATORS:
            near = get_close_matches(chosen, ACCELERATORS, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]}? " if near else ""
            yield Problem(
                "cluster.accelerator", f"{chosen!r} is not in the hardware table", hint + _names(ACCELERATORS)
            )
        return
    for name in ("peak_flops", "memory", "memory_bandwidth"):
        value = getattr(chosen, name)
        if not value > 0:
            yield Problem(f"cluster.accelerator.{name}", f"{name} is {value:g}, must be more than 0")


def _link_problems(where: str, link: LinkConfig) -> Iterable[Problem]:
    if link.bandwidth is None and link.kind not in LINKS:
        yield Problem(
            where,
            f"link {link.kind!r} is not in the hardware table and has no bandwidth",
            f"state bandwidth, or use one of {_names(LINKS)}",
        )
    if link.bandwidth is not None and not link.bandwidth > 0:
        yield Problem(f"{where}.bandwidth", f"bandwidth is {link.bandwidth:g} bytes/s, must be more than 0")
    if link.latency is not None and link.latency < 0:
        yield Problem(f"{where}.latency", f"latency is {link.latency:g} s, must not be negative")


def _names(table: Iterable[str]) -> str:
    return "known: " + ", ".join(table)
