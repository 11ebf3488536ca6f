"""What a machine is found to be: facts only, no judgement; JSON on the way from a node."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its driver tells; None and empty: it does not tell."""

    index: int
    name: str
    uuid: str
    memory_total: int
    """Bytes."""
    memory_used: int
    """Bytes, by whomever."""
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded; None when the GPU does not count them."""
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    throttle: tuple[str, ...] = ()
    """Why its clocks are held down now, idleness apart."""
    persistence: bool | None = None
    """Whether the driver stays loaded when nobody uses the GPU."""
    nvlinks_up: int = 0
    nvlinks_down: int = 0
    processes: tuple[int, ...] = ()
    """Pids that compute on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All GPUs, or why there are none."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    """Why no GPU can be seen; empty when there are some."""
    silent: tuple[str, ...] = ()
    """Those that the driver counts and that do not answer: `3: GPU is lost`."""
    is_broken: bool = False
    """Whether a driver is there that does not work, `reason` says why; False: there is none, or it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One error that the NVIDIA driver wrote into the kernel's log."""

    code: int
    device: str
    """PCI address."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IbPort:
    """One port of an InfiniBand or RoCE adapter."""

    name: str
    """`mlx5_0/1`."""
    state: str
    """`ACTIVE`, `DOWN`, `INIT`."""
    physical: str
    """`LinkUp`, `Polling`, `Disabled`."""
    rate: str
    """`400 Gb/sec (4X NDR)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A file system, seen from one folder."""

    path: str
    total: int
    """Bytes."""
    free: int
    """Bytes that this user may use."""
    inodes_total: int
    """0 when the file system does not limit them."""
    inodes_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTest:
    """One file written, forced to the disk, read back and removed."""

    seconds: float = 0.0
    bytes: int = 0
    clock_offset: float = 0.0
    """File server's clock minus this machine's, seconds."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that `probe_machine` found."""

    host: str
    system: str
    python: str
    torch: str
    """Version, empty when torch is not installed."""
    nccl: str = ""
    """Version of the NCCL that torch brought; empty without one."""
    cuda: str = ""
    """Version of the CUDA runtime that torch brought; empty without one."""
    cores: int
    """Cores that this process may use."""
    load: float
    """Processes that wanted a core over the last minute."""
    memory_total: int
    memory_available: int
    shared_memory: Disk | None
    """/dev/shm."""
    open_files: int
    """Soft limit; -1 is unlimited."""
    locked_memory: int
    """Soft limit in bytes; -1 is unlimited."""
    processes: int = -1
    """Soft limit of this user's processes and threads; -1 is unlimited."""
    host_resolves: str
    """Address of the own host name; empty when it has none."""
    leftover_ranks: tuple[int, ...] = ()
    """Pids of this user's ranks."""
    gpus: Gpus = field(default_factory=Gpus)
    xids: tuple[Xid, ...] = ()
    """Errors of the NVIDIA driver since the machine booted; empty also when the log may not be read."""
    infiniband: tuple[IbPort, ...] = ()
