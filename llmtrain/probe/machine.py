"""What this machine has: cores, memory, disks, limits, GPUs. Facts only; `backends/health.py` judges them.

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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain.probe.facts import Disk, Machine, WriteTest
from llmtrain.probe.gpus import probe_gpus, probe_xids
from llmtrain.probe.links import probe_infiniband

ENGINE_MODULE = "llmtrain.engine"
NCCL_PACKAGES = tuple(f"nvidia-nccl-cu{major}" for major in (13, 12, 11))
CUDA_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")
"""Distributions that torch's wheels depend on."""


def probe_machine() -> Machine:
    """Look at this machine. Never raises for something that is missing."""
    import psutil

    memory, gpus = psutil.virtual_memory(), probe_gpus()
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=package_version("torch"),
        nccl=_first_version(NCCL_PACKAGES),
        cuda=_first_version(CUDA_PACKAGES),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory_total=_memory_limit(memory.total),
        memory_available=min(memory.available, _memory_limit(memory.total)),
        shared_memory=probe_disk(Path("/dev/shm")),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        locked_memory=_soft_limit(resource.RLIMIT_MEMLOCK),
        processes=_soft_limit(resource.RLIMIT_NPROC),
        host_resolves=_own_address(),
        leftover_ranks=_running_ranks(psutil),
        gpus=gpus,
        xids=probe_xids() if gpus.driver or gpus.is_broken else (),
        infiniband=probe_infiniband(),
    )


def package_version(name: str) -> str:
    """Version of an installed package, without importing it; empty when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_version(names: Iterable[str]) -> str:
    return next((found for name in names if (found := package_version(name))), "")


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
