"""The cluster profile: where to train. Bandwidths in bytes/s, latencies and durations in seconds, memory in bytes.

In YAML these take units: `400 Gb/s`, `50 GB/s`, `5us`, `80 GB`, `30m`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorConfig:
    """One accelerator in numbers, for hardware that the table in `hardware.py` does not name."""

    name: str
    """Shown in tables."""
    peak_flops: float
    """Dense BF16 peak, FLOP/s."""
    memory: float
    """Device memory, bytes."""
    memory_bandwidth: float
    """Device memory bandwidth, bytes/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """One kind of link."""

    kind: str
    """Name in the link table (`nvlink3`, `ib-hdr`, `tcp`, `shared-memory`) or a free name with numbers."""
    bandwidth: float | None = None
    """Bytes/s per accelerator (intra-node) or per node (inter-node), one direction; default: from the table."""
    latency: float | None = None
    """Seconds per message; default: from the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNodeConfig:
    """The two planes between nodes."""

    data: LinkConfig
    """Carries collectives."""
    control: LinkConfig
    """Carries rendezvous, agents and logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """The file system that run directories lie on."""

    path: str = "runs"
    """Folder of run directories; relative to the working directory on `local`, absolute and shared elsewhere."""
    bandwidth: float
    """Aggregate write bandwidth, bytes/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """How ranks are started."""

    kind: Literal["local", "ssh", "slurm"]
    """`local` processes on this machine, `ssh` a list of hosts, `slurm` a scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Variables of the ranks."""

    variables: dict[str, str] = field(default_factory=dict)
    """Set for every rank; never a place for secrets."""
    pass_through: tuple[str, ...] = ()
    """Names taken over from the launching shell; their values are redacted everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """Where to train."""

    name: str
    """Short name."""
    description: str = ""
    """One line for `llmtrain profiles`."""
    nodes: int
    """Nodes that a run may use."""
    gpus_per_node: int
    """Accelerators, i.e. ranks, on each node."""
    accelerator: str | AcceleratorConfig
    """A name in the hardware table, or numbers."""
    host_memory: float | None = None
    """Host memory of a node, bytes."""
    intra_node: LinkConfig
    """Links inside a node."""
    inter_node: InterNodeConfig | None = None
    """Links between nodes; needed when nodes > 1."""
    storage: StorageConfig
    """Where run directories lie."""
    backend: BackendConfig
    """How ranks are started."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Variables of the ranks."""
    spares: int = 0
    """Nodes kept idle to replace lost ones; part of `nodes`."""
