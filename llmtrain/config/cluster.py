"""The cluster profile: where to train.

Bandwidths in bytes/s, latencies and durations in seconds, memory in bytes.
In YAML these take units: `400 Gb/s`, `50 GB/s`, `5us`, `80 GB`, `30m`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from llmtrain.config.fields import (
    Bandwidth,
    Bounds,
    Bytes,
    Duration,
    FlopRate,
    Name,
    NaturalFloat,
    NaturalInt,
    PositiveDuration,
    PositiveFloat,
    PositiveInt,
    Share,
    Verbatim,
)
from llmtrain.config.slurm import SlurmConfig
from llmtrain.config.ssh import SshConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorConfig:
    """One accelerator in numbers, for hardware that the table in `hardware.py` does not name."""

    name: str
    """Shown in tables."""
    peak_flops: FlopRate
    """Dense BF16 peak, FLOP/s."""
    memory: Bytes
    """Device memory, bytes."""
    memory_bandwidth: Bandwidth
    """Device memory bandwidth, bytes/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """One kind of link."""

    kind: str
    """Name in the link table (`nvlink3`, `ib-hdr`, `tcp`, `shared-memory`) or a free name with numbers."""
    bandwidth: Bandwidth | None = None
    """Bytes/s per accelerator (intra-node) or per node (inter-node), one direction.

    Default: from the table.
    """
    latency: Duration | None = None
    """Seconds per message; default: from the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNodeConfig:
    """The two planes between nodes."""

    data: LinkConfig
    """Carries collectives."""
    control: LinkConfig
    """Carries rendezvous, agents and logs. Checked, and compared with `data`; no prediction depends on it."""
    interface: str = ""
    """Network interface on every node that carries the control plane, e.g. `eth0`, and collectives too where
    they go over TCP; default: the one that the node is reached on."""
    data_interface: str = ""
    """Interface that carries collectives where they go over TCP; default: `interface`."""
    adapters: tuple[str, ...] = ()
    """InfiniBand adapters that carry collectives, e.g. `[mlx5_0, mlx5_1]`; default: all that NCCL finds."""
    algorithm: Literal["auto", "ring", "ring-and-tree", "any"] = "auto"
    """What NCCL may choose from: rings, trees across nodes too, or `any` (also NVLink and switch reduction).

    `auto`: `any` where GPUs share an NVSwitch that can reduce (NVLink 4 on), else `ring-and-tree`.
    """
    switches: dict[str, tuple[Annotated[str, Verbatim()], ...]] = field(default_factory=dict)
    """Leaf switch -> its nodes, `{leaf1: ['node[01-16]'], leaf2: ['node[17-32]']}`.

    Stages of one pipeline are placed under one switch. Default on SLURM: what `scontrol show topology` says.
    """

    @property
    def is_infiniband(self) -> bool:
        """Whether collectives go over InfiniBand."""
        return self.data.kind.startswith("ib")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatienceConfig:
    """How long calls between nodes may take."""

    control: PositiveDuration = 0.3
    """One try of a call of the control plane, e.g. to reach the rendezvous (duration, e.g. `300ms`)."""
    control_retries: NaturalInt = 3
    """Tries after the first one, each after a pause twice as long as the one before, from 100 ms on."""
    collective: PositiveDuration = 600.0
    """A collective, until the rank's watchdog ends it. A last resort: the supervisor notices earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """The file system that run directories lie on."""

    path: str = "runs"
    """Folder of run directories.

    Relative to the working directory on `local`, absolute and shared elsewhere.
    """
    shared: Literal["everywhere", "nodes"] = "everywhere"
    """Who sees `path`: `everywhere` the launching machine too, `nodes` only the nodes (with one node it need
    not be shared at all). Then files are sent, events and logs fetched; checkpoints stay on the nodes."""
    bandwidth: Bandwidth
    """Aggregate write bandwidth, bytes/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """How ranks are started."""

    kind: Literal["local", "ssh", "slurm"]
    """`local` processes on this machine, `ssh` a list of hosts, `slurm` a scheduler."""
    slurm: SlurmConfig | None = None
    """With `slurm`: what jobs ask for; None: the cluster's defaults."""
    python: str = ""
    """Interpreter on the nodes that has llmtrain, an absolute path; default: the one that launches."""
    ssh: SshConfig | None = None
    """With `ssh`: the nodes, and how to log in to them."""


VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What every shell takes for the whole name of a variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Variables of the ranks."""

    variables: dict[str, Annotated[str, Verbatim()]] = field(default_factory=dict)
    """Set for every rank; never a place for secrets."""
    pass_through: tuple[str, ...] = ()
    """Names taken over from the launching shell; their values are redacted everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareConfig:
    """What the training software on this cluster does.

    None: as the framework usually does on that generation of accelerators (`llmtrain.plan.software`).
    """

    framework: Literal["llmtrain", "megatron", "deepspeed", "fsdp"] = "llmtrain"
    """Whose bookkeeping of buffers and saved tensors the memory follows; `fsdp`: eager PyTorch under FSDP."""
    attention: Literal["flash1", "flash2", "flash3", "unfused"] | None = None
    """Attention kernel.

    `flash2` is what PyTorch's scaled_dot_product_attention runs, `flash3` stands for kernels written for the
    accelerator's newest units (FlashAttention-3, cuDNN), `unfused`: the score matrix goes through device
    memory.
    """
    fused_kernels: bool | None = None
    """Whether norms, bias, activation and residual adds run as fused kernels."""
    fused_loss: bool | None = None
    """Whether the loss runs as one kernel, without copies of the logits in FP32 (this package's engine has
    none)."""
    dropout: bool | None = None
    """Whether activations pass through dropout (its masks take memory)."""
    gradients: Literal["fp32", "bf16"] | None = None
    """Format that gradients are accumulated and reduced in."""
    fused_optimizer: bool | None = None
    """Whether the optimizer updates all tensors in few kernels."""
    overlap_gradients: bool | None = None
    """Whether gradients are reduced while the backward pass still runs."""
    overlap_weights: bool | None = None
    """Whether ZeRO weights are gathered beside the forward pass."""
    overlap_pipeline: bool | None = None
    """Whether stage-to-stage transfers run beside compute."""
    selective_recompute: Literal["attention", "operators", "alternate-layers"] | None = None
    """What `recompute: selective` runs again.

    `attention`: the attention core; `operators`: all but the attention core and every second product;
    `alternate-layers`: every second layer in full.
    """
    fp8_scaling: Literal["delayed", "tensor", "row"] | None = None
    """How FP8 scales are found: from earlier steps, from the tensor itself, or for each row."""
    fp8_gather: bool | None = None
    """Whether tensor-parallel ranks gather the inputs of FP8 products in FP8."""
    shard_within_node: bool | None = None
    """Whether ZeRO shards over the replicas of one node only, so that every node has all of them (hybrid
    sharding)."""
    pipeline_scatter: bool | None = None
    """Whether tensor-parallel ranks each send their share of a stage's output, which the receivers gather."""
    overlap_tensor: Share | None = None
    """Share of tensor-parallel traffic that runs beside GEMMs, 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """Constants measured on this cluster by `llmtrain profiles calibrate`.

    None: the value of the hardware table.
    """

    gemm: PositiveFloat | None = None
    """Share of the matrix peak that a large GEMM sustains."""
    memory_bandwidth: PositiveFloat | None = None
    """Share of the memory bandwidth that streaming kernels reach."""
    attention: PositiveFloat | None = None
    """Factor on the rate of fused attention kernels."""
    fp8: PositiveFloat | None = None
    """Factor on the rate of FP8 products."""
    launch_gap: Duration | None = None
    """Seconds from the end of one kernel to the start of the next."""
    intra_node: PositiveFloat | None = None
    """Factor on the bandwidth of collectives inside a node."""
    inter_node: PositiveFloat | None = None
    """Factor on the bandwidth of collectives between nodes."""
    cores: PositiveFloat | None = None
    """Processor cores that the CPU ranks of a node share; only for `accelerator: cpu`."""
    step_overhead: Duration | None = None
    """Seconds of each step that no layer explains (data, logging, synchronisation)."""
    date: str = ""
    """Day of the measurement, YYYY-MM-DD."""
    evidence: str = ""
    """What was measured, and how well the constants explain it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """How often nodes fail and what a restart costs."""

    node_mtbf: PositiveDuration = 2.16e7
    """Mean time between failures of one node, seconds (duration, e.g. `250d`)."""
    restart: Duration = 300.0
    """Seconds from a failure to the first step of the next attempt, without the steps done again."""
    repair: PositiveDuration = 86400.0
    """Seconds until a failed node is back (duration, e.g. `1d`)."""
    wait_for_node: Duration = 0.0
    """Longest wait for lost nodes to come back when no layout fits on those that are left, inside the
    node-loss budget; then the run ends with exit code 93."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where a run's supervisor offers Prometheus metrics for as long as it lives; by default nowhere, so that
    no run opens a port that nobody asked for."""

    port: Annotated[int, Bounds(low=0, high=65535)] | None = None
    """Port that scrapes are answered on, e.g. 9477; 0 takes a free one (`metrics.log` says which)."""
    address: str = "127.0.0.1"
    """Address of the supervisor's machine that the port is opened on."""
    text_file: str = ""
    """File that is kept up to date for node_exporter's textfile collector, e.g.
    `/var/lib/node_exporter/llmtrain.prom`; an absolute path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """Where to train."""

    name: Name
    """Short name."""
    description: str = ""
    """One line for `llmtrain profiles`."""
    nodes: PositiveInt
    """Nodes that a run may use."""
    gpus_per_node: PositiveInt
    """Accelerators, i.e. ranks, on each node."""
    accelerator: str | AcceleratorConfig
    """A name in the hardware table, or numbers."""
    host_memory: Bytes | None = None
    """Host memory of a node, bytes."""
    intra_node: LinkConfig
    """Links inside a node."""
    inter_node: InterNodeConfig | None = None
    """Links between nodes; needed when nodes > 1."""
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    """How long calls between nodes may take."""
    storage: StorageConfig
    """Where run directories lie."""
    backend: BackendConfig
    """How ranks are started."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Variables of the ranks."""
    spares: NaturalInt = 0
    """Nodes kept idle to replace lost ones; part of `nodes`."""
    software: SoftwareConfig = field(default_factory=SoftwareConfig)
    """What the training software does."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Constants measured on this cluster."""
    failures: FailureConfig = field(default_factory=FailureConfig)
    """How often nodes fail."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Prometheus metrics beside every run."""
    gpu_hour_price: NaturalFloat | None = None
    """Price of one accelerator for an hour, in any currency; None: no price is shown."""
