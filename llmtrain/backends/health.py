"""Judges a machine: would ranks work on it, and what would be in their way. Pure; `probe/` has the facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.probe.facts import Disk, Gpu, Machine, WriteTest, Xid
from llmtrain.units import format_bytes, format_duration

GB = 10**9
LEAST_FREE, LOW_FREE = GB // 2, 5 * GB
"""Free disk space below which a run fails soon, and below which checkpoints may not fit."""
LEAST_MEMORY, LOW_MEMORY = GB // 4, 4 * GB
LEAST_INODES, LOW_INODES = 100, 10_000
LOW_OPEN_FILES = 1024
LOW_PROCESSES = 4096
LOW_SHARED_MEMORY = GB
SLOW_WRITE_SECONDS = 1.0
CLOCK_SECONDS = 1.0
BUSY_GPU_BYTES = GB
BROKEN_XIDS = {
    48: "double-bit memory error",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "its firmware does not answer",
    120: "its firmware failed",
}
"""NVIDIA's numbers ("XID Errors") of what only a reset or a repair mends -> what they mean."""

Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    name: str
    level: Level
    found: str
    hint: str = ""


def judge(machine: Machine, disk: Disk | None, write: WriteTest | None, *, gpus: int = 0) -> Iterator[Check]:
    """All checks, in the order in which they are shown; `gpus`: how many GPUs the profile promises.

    A failure keeps ranks from working, a warning may. Without a write test nothing was written.
    """
    yield from _software(machine)
    yield from _host(machine)
    yield from _limits(machine)
    yield from _space(disk)
    if write is not None:
        yield from _write(write)
    yield from _gpus(machine, gpus)
    yield from _links(machine)


def _software(machine: Machine) -> Iterator[Check]:
    yield Check("system", "ok", f"{machine.host}, {machine.system}")
    yield Check("python", "ok", machine.python)
    if machine.torch:
        yield Check("torch", "ok", machine.torch)
    else:
        yield Check("torch", "failure", "not installed", "pip install torch")


def _host(machine: Machine) -> Iterator[Check]:
    busy = machine.load > machine.cores
    cores = f"{machine.cores} usable, load {machine.load:.1f}"
    yield Check("cores", "warning" if busy else "ok", cores, "other work slows the ranks" if busy else "")
    yield Check(
        "memory",
        _level(machine.memory_available, LEAST_MEMORY, LOW_MEMORY),
        f"{format_bytes(machine.memory_available)} of {format_bytes(machine.memory_total)} available",
        "" if machine.memory_available >= LOW_MEMORY else "end other work there, or use another node",
    )
    if machine.shared_memory is not None:
        small = machine.shared_memory.total < LOW_SHARED_MEMORY and bool(machine.gpus.gpus)
        yield Check(
            "/dev/shm",
            "warning" if small else "ok",
            f"{format_bytes(machine.shared_memory.free)} of {format_bytes(machine.shared_memory.total)} free",
            "NCCL keeps its buffers there; in a container use --shm-size" if small else "",
        )
    resolves = bool(machine.host_resolves)
    yield Check(
        "host name",
        "ok" if resolves else "warning",
        machine.host_resolves or f"{machine.host} has no address",
        "" if resolves else f"add {machine.host} to /etc/hosts",
    )
    left = len(machine.leftover_ranks)
    pids = " ".join(map(str, machine.leftover_ranks[:8]))
    yield Check("ranks at work", "ok", f"{left} (pids {pids})" if left else "none")


def _limits(machine: Machine) -> Iterator[Check]:
    few = 0 <= machine.open_files < LOW_OPEN_FILES
    yield Check(
        "open files",
        "warning" if few else "ok",
        _limit(machine.open_files),
        "ulimit -n 65536" if few else "",
    )
    few = 0 <= machine.processes < LOW_PROCESSES
    hint = "torchrun and its ranks start many threads: ulimit -u 65536" if few else ""
    yield Check("processes", "warning" if few else "ok", _limit(machine.processes), hint)


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def _space(disk: Disk | None) -> Iterator[Check]:
    if disk is None:
        return
    yield Check(
        "disk",
        _level(disk.free, LEAST_FREE, LOW_FREE),
        f"{format_bytes(disk.free)} of {format_bytes(disk.total)} free at {disk.path}",
        ""
        if disk.free >= LOW_FREE
        else "`llmtrain checkpoint prune RUN` frees space, or another storage.path",
    )
    limited = disk.inodes_total > 0
    level = _level(disk.inodes_free, LEAST_INODES, LOW_INODES) if limited else "ok"
    inodes = f"{disk.inodes_free:,} free" if limited else "not limited"
    hint = "" if level == "ok" else f"remove files below {disk.path}, or ask for a larger quota of files"
    yield Check("inodes", level, inodes, hint)


def _write(write: WriteTest) -> Iterator[Check]:
    if write.error:
        yield Check("write test", "failure", write.error, "choose a folder you may write: --runs DIR")
        return
    slow = write.seconds > SLOW_WRITE_SECONDS
    written = f"{format_bytes(write.bytes)} written, synced and read back in {format_duration(write.seconds)}"
    yield Check("write test", "warning" if slow else "ok", written)
    off = abs(write.clock_offset) > CLOCK_SECONDS
    yield Check(
        "clock",
        "warning" if off else "ok",
        f"file server is {write.clock_offset:+.2f} s from this machine"
        if off
        else "agrees with the file server",
        "run a time service (chrony) on both" if off else "",
    )


def _gpus(machine: Machine, wanted: int) -> Iterator[Check]:
    found = machine.gpus
    if len(found.gpus) < wanted:
        why = f" ({found.reason})" if found.reason else ""
        hint = "`nvidia-smi` there shows what the driver sees; `dmesg | grep NVRM` why"
        yield Check("GPUs", "failure", f"{len(found.gpus)}, the profile promises {wanted}{why}", hint)
    elif found.is_broken:
        hint = "`nvidia-smi` there says more; after an update of the driver: reboot, or load its module anew"
        yield Check("GPUs", "warning", f"none can be used: {found.reason}", hint)
    elif not found.gpus and not found.silent:
        yield Check("GPUs", "ok", f"none, ranks run on the CPU ({found.reason})")
    for silent in found.silent:
        index, _, why = silent.partition(": ")
        yield Check(f"GPU {index}", "failure", f"does not answer: {why}", "reset it or reboot the node")
    if not found.gpus:
        yield from _xids(machine.xids)
        return
    yield Check("GPU driver", "ok", found.driver)
    for gpu in found.gpus:
        yield _gpu(gpu)
    yield from _xids(machine.xids)
    if 0 <= machine.locked_memory < GB:
        locked = format_bytes(machine.locked_memory)
        yield Check("locked memory", "warning", locked, "InfiniBand needs: ulimit -l unlimited")


def _gpu(gpu: Gpu) -> Check:
    name, found = f"GPU {gpu.index}", f"{gpu.name}, {format_bytes(gpu.memory_total)}"
    if gpu.row_remap_failed:
        return Check(name, "failure", f"{found}: a memory row could not be remapped", "replace this GPU")
    if gpu.row_remap_pending:
        return Check(name, "warning", f"{found}: a memory row waits for its remapping", "reset this GPU")
    if gpu.uncorrected_ecc_errors:
        errors = gpu.uncorrected_ecc_errors
        return Check(name, "warning", f"{found}: {errors} uncorrected memory errors", "reset this GPU")
    if gpu.throttle:
        hint = "`nvidia-smi -q -d PERFORMANCE` there; look at cooling and power"
        return Check(name, "warning", f"{found}: clocks held down: {', '.join(gpu.throttle)}", hint)
    if gpu.nvlinks_up and gpu.nvlinks_down:
        total = gpu.nvlinks_up + gpu.nvlinks_down
        hint = "`nvidia-smi nvlink --status` there; a reset or a repair mends it"
        return Check(name, "warning", f"{found}: {gpu.nvlinks_down} of {total} NVLinks are down", hint)
    if gpu.processes or gpu.memory_used > BUSY_GPU_BYTES:
        who = f" (pids {' '.join(map(str, gpu.processes[:8]))})" if gpu.processes else ""
        used = f"{found}: {format_bytes(gpu.memory_used)} in use by others{who}"
        return Check(name, "warning", used, "end what still runs there, or wait for it")
    if gpu.persistence is False:
        hint = "`nvidia-smi -pm 1`, or the nvidia-persistenced service: the first use is slow without"
        return Check(name, "warning", f"{found}: persistence mode is off", hint)
    return Check(name, "ok", found)


def _xids(xids: Sequence[Xid]) -> Iterator[Check]:
    """Errors that only a reset mends; the others are mostly those of programs."""
    for xid in {each.code: each for each in xids if each.code in BROKEN_XIDS}.values():
        found = f"{xid.code} on {xid.device}: {BROKEN_XIDS[xid.code]}"
        yield Check(
            "GPU error (Xid)", "failure", found, "reset the GPU or reboot the node; repair if it returns"
        )
    harmless = sorted({each.code for each in xids if each.code not in BROKEN_XIDS})
    if harmless:
        codes = ", ".join(map(str, harmless))
        yield Check("GPU errors (Xid)", "ok", f"{codes} since boot, such as programs cause")


def _links(machine: Machine) -> Iterator[Check]:
    ports = machine.infiniband
    down = [port for port in ports if port.state != "ACTIVE" and port.physical != "Disabled"]
    if down and len(down) < len(ports):
        named = ", ".join(f"{port.name} {port.state or 'unknown'} ({port.physical or '-'})" for port in down)
        yield Check("InfiniBand", "warning", named, "`ibstat` there; cable, transceiver or switch port")
    elif ports:
        rates = sorted({port.rate for port in ports if port not in down})
        level: Level = "warning" if down else "ok"
        found = f"{len(ports) - len(down)} of {len(ports)} ports active {', '.join(rates)}".strip()
        yield Check("InfiniBand", level, found, "`ibstat` there" if down else "")


def _level(value: int, least: int, low: int) -> Level:
    if value < least:
        return "failure"
    return "warning" if value < low else "ok"
