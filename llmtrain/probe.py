"""What this machine has: cores, memory, disks, limits, GPUs. Facts only; `observe/doctor.py` judges them.

psutil and pynvml are imported inside the functions, so that commands which do not probe do not pay for them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINE_MODULE = "llmtrain.engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its driver tells."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All GPUs, or why there are none."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    """Why no GPU can be seen; empty when there are some."""


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
    host_resolves: str
    """Address of the own host name; empty when it has none."""
    leftover_ranks: tuple[int, ...] = ()
    """Pids of this user's ranks."""
    gpus: Gpus = field(default_factory=Gpus)


def probe_machine() -> Machine:
    """Look at this machine. Never raises for something that is missing."""
    import psutil

    memory = psutil.virtual_memory()
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=package_version("torch"),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory_total=_memory_limit(memory.total),
        memory_available=min(memory.available, _memory_limit(memory.total)),
        shared_memory=probe_disk(Path("/dev/shm")),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        locked_memory=_soft_limit(resource.RLIMIT_MEMLOCK),
        host_resolves=_own_address(),
        leftover_ranks=_running_ranks(psutil),
        gpus=probe_gpus(),
    )


def package_version(name: str) -> str:
    """Version of an installed package, without importing it; empty when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def probe_disk(path: Path) -> Disk | None:
    """The file system of a folder, or of the nearest folder above that exists; None when it cannot be
    asked."""
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), None)
    if existing is None:
        return None
    try:
        found = os.statvfs(existing)
    except OSError:
        return None
    return Disk(
        path=str(existing),
        total=found.f_blocks * found.f_frsize,
        free=found.f_bavail * found.f_frsize,
        inodes_total=found.f_files,
        inodes_free=found.f_favail,
    )


def probe_write(folder: Path, size: int = 1 << 20) -> WriteTest:
    """Write, fsync, read back and remove a file of `size` bytes; makes the folder and leaves it when it was
    there."""
    made = not folder.exists()
    file = folder / f".llmtrain-doctor-{uuid.uuid4().hex}"
    data = os.urandom(size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        with file.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        seconds = time.perf_counter() - begun
        file.touch()
        offset = file.stat().st_mtime - time.time()
        same = file.read_bytes() == data
        return WriteTest(
            seconds=seconds,
            bytes=size,
            clock_offset=offset,
            error="" if same else "what was read back differs from what was written",
        )
    except OSError as error:
        return WriteTest(error=f"{error.strerror or error}")
    finally:
        with suppress(OSError):
            file.unlink()
        if made:
            with suppress(OSError):
                folder.rmdir()


def probe_gpus() -> Gpus:
    """All NVIDIA GPUs with their health counters, or the reason why none can be seen."""
    try:
        import pynvml
    except ImportError:
        return Gpus(reason="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(reason=str(error))
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        found = tuple(_probe_gpu(pynvml, index) for index in range(count))
        return Gpus(driver=driver, gpus=found, reason="" if found else "the driver sees no GPU")
    except pynvml.NVMLError as error:
        return Gpus(reason=str(error))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _probe_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    errors: int | None = None
    pending: bool | None = None
    failed: bool | None = None
    with suppress(nvml.NVMLError):
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    with suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        pending, failed = bool(is_pending), bool(has_failed)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_total=memory.total,
        memory_used=memory.used,
        uncorrected_ecc_errors=errors,
        row_remap_pending=pending,
        row_remap_failed=failed,
    )


def _text(value: Any) -> str:
    """pynvml gives bytes or text, depending on its version."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _soft_limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _memory_limit(total: int) -> int:
    """The machine's memory, or the control group's limit where that is lower."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return min(total, int(Path(name).read_text(encoding="ascii")))
    return total


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _running_ranks(psutil: Any) -> tuple[int, ...]:
    """Ranks of this user. torchrun's own command line names the module too, but not as the program it
    runs."""
    own, found = os.getuid(), []
    for process in psutil.process_iter(["pid", "uids", "cmdline"]):
        command = process.info["cmdline"] or []
        uids = process.info["uids"]
        if uids is not None and uids.real == own and ENGINE_MODULE in command and "-m" in command:
            place = command.index(ENGINE_MODULE)
            if command[place - 1] == "-m" and place <= 3:
                found.append(process.info["pid"])
    return tuple(found)
