"""Variables that a cluster's hardware asks for, each with the reason that stands above it in the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.config.cluster import ClusterProfile


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
    if cluster.inter_node is not None and cluster.inter_node.data.kind.startswith("ib"):
        yield Setting(
            "NCCL_IB_TIMEOUT",
            "22",
            "InfiniBand waits about 17 s for an answer before it gives up: a link flap ends no run.",
        )
        yield Setting("NCCL_IB_RETRY_CNT", "7", "The most retries that the hardware knows.")
