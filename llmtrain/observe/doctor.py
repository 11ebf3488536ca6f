"""Judges a machine: would a run work here, and what would be in its way. Pure; the facts come from
`probe.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from llmtrain.errors import ExitStatus
from llmtrain.observe.tables import add_column, one_line_table
from llmtrain.observe.wording import STYLES, bytes_text, duration_text
from llmtrain.probe import Disk, Gpu, Machine, WriteTest, probe_disk, probe_machine, probe_write

GB = 10**9
LEAST_FREE, LOW_FREE = GB // 2, 5 * GB
"""Free disk space below which a run fails soon, and below which checkpoints may not fit."""
LEAST_MEMORY, LOW_MEMORY = GB, 4 * GB
LOW_INODES = 10_000
LOW_OPEN_FILES = 1024
LOW_SHARED_MEMORY = GB
SLOW_WRITE_SECONDS = 1.0
CLOCK_SECONDS = 1.0
BUSY_GPU_BYTES = GB

Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    name: str
    level: Level
    found: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All checks of a machine."""

    machine: Machine
    disk: Disk | None
    write: WriteTest
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """The worst level in one sentence."""
        failures = sum(check.level == "failure" for check in self.checks)
        warnings = sum(check.level == "warning" for check in self.checks)
        if failures:
            return f"a run would not work here: {failures} of {len(self.checks)} checks failed"
        if warnings:
            return f"a run can work here; {warnings} of {len(self.checks)} checks deserve a look"
        return "a run can work here"

    @property
    def exit_status(self) -> ExitStatus:
        """DONE unless a check failed."""
        failed = any(check.level == "failure" for check in self.checks)
        return ExitStatus.FAILED if failed else ExitStatus.DONE

    def document(self) -> dict[str, Any]:
        """What `doctor --json` prints."""
        return {
            "schema": 1,
            "verdict": self.verdict,
            "ok": self.exit_status is ExitStatus.DONE,
            "machine": asdict(self.machine),
            "disk": asdict(self.disk) if self.disk else None,
            "write_test": asdict(self.write),
            "checks": [asdict(check) for check in self.checks],
        }


def diagnose(runs: Path) -> Diagnosis:
    """Probe this machine and the folder of run directories, and judge them."""
    machine, disk, write = probe_machine(), probe_disk(runs), probe_write(runs)
    return Diagnosis(machine=machine, disk=disk, write=write, checks=tuple(judge(machine, disk, write)))


def judge(machine: Machine, disk: Disk | None, write: WriteTest) -> Iterator[Check]:
    """All checks, in the order in which they are shown."""
    yield from _software(machine)
    yield from _host(machine)
    yield from _storage(disk, write)
    yield from _gpus(machine)


def checks_table(diagnosis: Diagnosis) -> Table:
    """One line a check; hints stand on lines of their own."""
    table = one_line_table()
    for name in ("check", "result", "found"):
        add_column(table, name, rest=name == "found")
    for check in diagnosis.checks:
        style = STYLES.get({"ok": "alive", "failure": "failed"}.get(check.level, check.level), "")
        table.add_row(check.name, Text(check.level, style=style), check.found)
    return table


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
        f"{bytes_text(machine.memory_available)} of {bytes_text(machine.memory_total)} available",
    )
    if machine.shared_memory is not None:
        small = machine.shared_memory.total < LOW_SHARED_MEMORY and bool(machine.gpus.gpus)
        yield Check(
            "/dev/shm",
            "warning" if small else "ok",
            f"{bytes_text(machine.shared_memory.free)} of {bytes_text(machine.shared_memory.total)} free",
            "NCCL keeps its buffers there; in a container use --shm-size" if small else "",
        )
    few = 0 <= machine.open_files < LOW_OPEN_FILES
    files = "unlimited" if machine.open_files < 0 else str(machine.open_files)
    yield Check("open files", "warning" if few else "ok", files, "ulimit -n 65536" if few else "")
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


def _storage(disk: Disk | None, write: WriteTest) -> Iterator[Check]:
    if disk is not None:
        yield Check(
            "disk",
            _level(disk.free, LEAST_FREE, LOW_FREE),
            f"{bytes_text(disk.free)} of {bytes_text(disk.total)} free at {disk.path}",
        )
        limited = disk.inodes_total > 0
        few = limited and disk.inodes_free < LOW_INODES
        inodes = f"{disk.inodes_free:,} free" if limited else "not limited"
        yield Check("inodes", "warning" if few else "ok", inodes)
    if write.error:
        yield Check("write test", "failure", write.error, "choose a folder you may write: --runs DIR")
        return
    slow = write.seconds > SLOW_WRITE_SECONDS
    written = f"{bytes_text(write.bytes)} written, synced and read back in {duration_text(write.seconds)}"
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


def _gpus(machine: Machine) -> Iterator[Check]:
    if not machine.gpus.gpus:
        yield Check("GPUs", "ok", f"none, ranks run on the CPU ({machine.gpus.reason})")
        return
    yield Check("GPU driver", "ok", machine.gpus.driver)
    for gpu in machine.gpus.gpus:
        yield _gpu(gpu)
    if 0 <= machine.locked_memory < GB:
        locked = bytes_text(machine.locked_memory)
        yield Check("locked memory", "warning", locked, "InfiniBand needs: ulimit -l unlimited")


def _gpu(gpu: Gpu) -> Check:
    name, found = f"GPU {gpu.index}", f"{gpu.name}, {bytes_text(gpu.memory_total)}"
    if gpu.row_remap_failed:
        return Check(name, "failure", f"{found}: a memory row could not be remapped", "replace this GPU")
    if gpu.row_remap_pending:
        return Check(name, "warning", f"{found}: a memory row waits for its remapping", "reset this GPU")
    if gpu.uncorrected_ecc_errors:
        errors = gpu.uncorrected_ecc_errors
        return Check(name, "warning", f"{found}: {errors} uncorrected memory errors", "reset this GPU")
    if gpu.memory_used > BUSY_GPU_BYTES:
        return Check(name, "warning", f"{found}: {bytes_text(gpu.memory_used)} in use by others")
    return Check(name, "ok", found)


def _level(value: int, least: int, low: int) -> Level:
    if value < least:
        return "failure"
    return "warning" if value < low else "ok"
