"""How much memory this node still has for more processes: of the machine, and of the control groups that a
scheduler or a container put this process into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

STANDBY_BYTES = 400 << 20
"""What a rank in standby may take, its share of torchrun included (about 0.25 GB measured with torch 2.13 on
a CPU, more with CUDA's libraries)."""
KEPT_FREE = 0.10
"""Share of the memory that stays free besides: training must never be killed for a standby."""
CGROUPS = Path("/sys/fs/cgroup")


def no_room_for(ranks: int) -> str:
    """Why so many ranks in standby would be too many for the memory here; empty when they are not."""
    memory = psutil.virtual_memory()
    limits = [("the machine", memory.available, memory.total), *_cgroup_limits()]
    needed = ranks * STANDBY_BYTES
    for what, free, total in limits:
        if free < needed + KEPT_FREE * total:
            return (
                f"{what} has {free / 1e9:.1f} GB of {total / 1e9:.1f} GB memory free, {ranks} ranks in "
                f"standby need {needed / 1e9:.1f} GB and {KEPT_FREE:.0%} is kept free"
            )
    return ""


def cgroups_of(pid: int | str = "self") -> Iterator[Path]:
    """Folders of a process's control groups that limit memory, the innermost first (versions 1 and 2)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                root = CGROUPS if number == "0" else CGROUPS / "memory"
                folder = root / path.lstrip("/")
                while folder.is_relative_to(root):
                    yield folder
                    folder = folder.parent


def _cgroup_limits() -> Iterator[tuple[str, int, int]]:
    """(name, bytes free, bytes in all) of every limit on this process's memory."""
    for folder in cgroups_of():
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < 1 << 60:
                # Page cache counts as used, and goes when it is needed.
                cache = _stat(folder / "memory.stat", "inactive_file")
                yield "its control group", limit - used + cache, limit


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _stat(path: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
