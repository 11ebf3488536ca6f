"""Whether a process is still the one it was: its pid together with its start time and the boot it belongs to.

A pid alone is not an identity; the kernel hands it out again. Read from /proc, without psutil, because the
`run` floor is used by every command.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

START_FIELD, STATE_FIELD = 19, 0
"""Positions in /proc/PID/stat after the command name (proc(5): fields 22 and 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of one boot of one machine."""

    host: str
    boot: str
    """The kernel's boot id; empty where it cannot be read."""
    pid: int
    start: int
    """Start time in clock ticks since boot; 0 where it cannot be read."""

    def is_here(self) -> bool:
        """Whether the process belongs to this machine and this boot, so that `is_alive` can tell."""
        return self.host == socket.gethostname() and self.boot == boot_id()

    def is_alive(self) -> bool:
        """Whether exactly this process runs here; a zombie does not."""
        if not self.is_here():
            return False
        state, start = _stat(self.pid)
        return state not in ("", "Z", "X") and self.start in (0, start)


def this_process() -> ProcessIdentity:
    """The calling process."""
    return ProcessIdentity(
        host=socket.gethostname(), boot=boot_id(), pid=os.getpid(), start=_stat(os.getpid())[1]
    )


def boot_id() -> str:
    """The identity of this boot, or an empty text."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time; an empty state when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    # The command name may hold spaces and parentheses: count from the last one.
    fields = text[text.rfind(")") + 2 :].split()
    return fields[STATE_FIELD], int(fields[START_FIELD])
