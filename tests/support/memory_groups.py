"""Memory control groups of this machine, of version 1 or 2, made by hand as a container's runtime would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from llmtrain.agent.room import cgroups_of
from tests.support.beds import unavailable

VICTIM_SCORE = 1000
"""Of oom_score_adj: the kernel takes this process first."""
UNLIMITED = 1 << 40
GREEDY = """
import sys, time
sys.stdin.read(1)
kept, victim = [], f"/proc/{sys.argv[1]}/stat"
try:
    while open(victim).read().rpartition(") ")[2][0] not in "ZX":
        kept.append(b"x" * (1 << 20))
        time.sleep(0.001)
except OSError:
    pass
"""
"""Takes memory until another process is killed for it."""


@dataclass(frozen=True)
class MemoryGroup:
    """One group below this process's own."""

    folder: Path
    is_v2: bool

    def limit(self, size: int) -> None:
        """Bytes that all processes in it may use together."""
        name = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(size))

    def used(self) -> int:
        """Bytes that they use, page cache included."""
        name = "memory.current" if self.is_v2 else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    def add(self, pid: int) -> None:
        """Put a process into it; what it starts from now on is in it too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def exhaust(self, victim: int, room: int = 32 << 20, seconds: float = 60.0) -> None:
        """Have the kernel kill a process of the group: another one takes what memory is left, and the victim
        is the one that the kernel likes best. What was taken is given back."""
        Path(f"/proc/{victim}/oom_score_adj").write_text(str(VICTIM_SCORE))
        self.limit(self.used() + room)
        greedy = subprocess.Popen([sys.executable, "-c", GREEDY, str(victim)], stdin=subprocess.PIPE)
        try:
            self.add(greedy.pid)
            assert greedy.stdin is not None
            greedy.stdin.write(b"!")
            greedy.stdin.close()
            deadline = time.monotonic() + seconds
            while _runs(victim):
                assert time.monotonic() < deadline, "the kernel killed nobody"
                assert not greedy.poll(), "the kernel killed another process"
                time.sleep(0.001)
        finally:
            greedy.kill()
            greedy.wait()
            self.limit(UNLIMITED)


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """A new group; skips the test where none can be made. Whatever is left in it at the end is killed."""
    if os.geteuid():
        unavailable("a memory control group needs root")
    parent = next((folder for folder in cgroups_of() if _limits_memory(folder)), None)
    if parent is None:
        unavailable("there is no control group that limits memory here")
    group = MemoryGroup(parent / name, is_v2=(parent / "cgroup.controllers").exists())
    try:
        group.folder.mkdir()
        group.limit(UNLIMITED)
    except OSError as error:
        with suppress(OSError):
            group.folder.rmdir()
        unavailable(f"no memory control group can be made below {parent}: {error.strerror}")
    try:
        yield group
    finally:
        _remove(group.folder)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _limits_memory(folder: Path) -> bool:
    if (folder / "memory.limit_in_bytes").exists():
        return True
    with suppress(OSError):
        return "memory" in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(OSError, ProcessLookupError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
