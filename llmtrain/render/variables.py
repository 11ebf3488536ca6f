"""Variables that a cluster's hardware asks for, each with the reason that stands above it in the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.config.cluster import ClusterProfile, InterNodeConfig

REDUCING_SWITCHES = ("nvlink4", "nvlink5")
"""Links inside a node whose switch adds up what passes through it, faster than a ring."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One exported variable."""

    name: str
    value: str
    why: str


def settings(cluster: ClusterProfile) -> tuple[Setting, ...]:
    """Settings of a profile, in the order of the script."""
    found = [*_interfaces(cluster)]
    if cluster.accelerator != "cpu":
        found += [*_cuda(), *_fabric(cluster)]
    return tuple(found)


def _interfaces(cluster: ClusterProfile) -> Iterator[Setting]:
    if cluster.backend.kind == "local":
        why = "All ranks are on this machine: their traffic stays on the loopback device."
        yield Setting("GLOO_SOCKET_IFNAME", "lo", why)
        yield Setting("NCCL_SOCKET_IFNAME", "lo", why)
        return
    planes = cluster.inter_node
    if planes is None:
        return
    # Without names in the profile, the agent sets them to the interface that its node is reached on.
    if planes.interface:
        why = "Control plane: rendezvous and agents meet on this interface (inter_node.interface)."
        yield Setting("TP_SOCKET_IFNAME", planes.interface, why)
        if planes.is_infiniband:
            why = "Control plane: NCCL's own connections are set up over TCP, beside the data plane."
            yield Setting("NCCL_SOCKET_IFNAME", planes.interface, why)
    data = planes.data_interface or planes.interface
    if data and not planes.is_infiniband:
        why = "Data plane: collectives go over TCP on this interface."
        yield Setting("GLOO_SOCKET_IFNAME", data, why)
        yield Setting("NCCL_SOCKET_IFNAME", data, why)


def _cuda() -> Iterator[Setting]:
    yield Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "A failed collective ends the rank and is not waited for."
    )
    yield Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "A collective that times out leaves a record of who had entered it.",
    )
    yield Setting("TORCH_FR_BUFFER_SIZE", "2000", "Length of that record, in collectives.")
    yield Setting("NCCL_DEBUG", "WARN", "NCCL names the link or peer that failed.")
    yield Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "Kernels start in the order they were issued in, so that tensor-parallel communication overlaps.",
    )
    yield Setting(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True",
        "The caching allocator can grow its segments, which leaves less memory in fragments.",
    )


def _fabric(cluster: ClusterProfile) -> Iterator[Setting]:
    planes = cluster.inter_node
    if planes is None:
        return
    if planes.is_infiniband:
        yield from _infiniband(planes)
    elif planes.data.kind == "tcp":
        yield Setting("NCCL_NET", "Socket", "Data plane: the profile says TCP, so no adapter is looked for.")
    yield from _algorithm(cluster, planes)


def _infiniband(planes: InterNodeConfig) -> Iterator[Setting]:
    yield Setting(
        "NCCL_NET",
        "IB",
        "Data plane: InfiniBand, or an error that says so; NCCL alone would quietly fall back to TCP.",
    )
    if planes.adapters:
        yield Setting("NCCL_IB_HCA", f"={','.join(planes.adapters)}", "The data plane's adapters, exactly.")
    yield Setting(
        "NCCL_IB_TIMEOUT",
        "22",
        "InfiniBand waits about 17 s for an answer before it gives up: a link flap ends no run.",
    )
    yield Setting("NCCL_IB_RETRY_CNT", "7", "The most retries that the hardware knows.")


def _algorithm(cluster: ClusterProfile, planes: InterNodeConfig) -> Iterator[Setting]:
    """Rings inside a node, and across nodes rings for much data and trees for little."""
    chosen = planes.algorithm
    if chosen == "auto":
        chosen = "any" if cluster.intra_node.kind in REDUCING_SWITCHES else "ring-and-tree"
    if chosen != "any" and cluster.nodes > 1:
        value = {"ring": "Ring", "ring-and-tree": "Ring,Tree"}[chosen]
        why = (
            "Rings inside the nodes; across nodes also trees, whose latency grows with their logarithm only."
        )
        yield Setting("NCCL_ALGO", value, why if "Tree" in value else "Rings only (inter_node.algorithm).")
