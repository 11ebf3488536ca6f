"""What ranks are doing, seen from outside: their flight recorder, their state and their I/O in /proc.

Nothing here waits for a rank: it works for one that is stopped, or hangs in a driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.agent.ranks import RankProcess
from llmtrain.run.flight import SIZE, FlightView, find_page, read_page

FIND_SECONDS = 2.0
"""How often a rank whose recorder has not been found is looked at for it."""
STATE = 0
"""Place in /proc/PID/stat after the command's name (proc(5): field 3)."""


@dataclass(slots=True)
class _Watched:
    process: RankProcess
    page: int | None = None
    sought: float = float("-inf")
    last: tuple[bytes, int] = (b"", 0)


class Pulse:
    """The ranks of one node script; also of those that have died, whose last words stay readable."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Watched] = {}
        self._moved: float | None = None

    def add(self, processes: Iterable[RankProcess]) -> None:
        """Watch more ranks."""
        for process in processes:
            self._ranks[process.rank] = _Watched(process)

    def quiet(self, now: float) -> float | None:
        """Seconds since anything moved; None until something was seen to move."""
        for watched in self._ranks.values():
            self._find_page(watched, now)
            found = (b"" if watched.page is None else _read(watched.page), _bytes_moved(watched.process.pid))
            if found != watched.last:
                watched.last = found
                self._moved = now
        return None if self._moved is None else now - self._moved

    def evidence(self, now: float) -> tuple[dict[str, Any], ...]:
        """One record a rank: rank, pid, state (letter of /proc, empty when gone), kernel function it sleeps
        in, and what its recorder says."""
        return tuple(self._evidence_of(watched, now) for _, watched in sorted(self._ranks.items()))

    def _evidence_of(self, watched: _Watched, now: float) -> dict[str, Any]:
        self._find_page(watched, now)
        pid = watched.process.pid
        view: FlightView | None = None if watched.page is None else read_page(watched.page)
        return {
            "rank": watched.process.rank,
            "pid": pid,
            "state": _state(pid),
            "sleeps_in": _text(f"/proc/{pid}/wchan"),
            "flight": None if view is None else asdict(view),
        }

    def _find_page(self, watched: _Watched, now: float) -> None:
        if watched.page is None and now - watched.sought >= FIND_SECONDS:
            watched.sought = now
            watched.page = find_page(watched.process.pid)


def _read(page: int) -> bytes:
    try:
        return os.pread(page, SIZE, 0)
    except OSError:
        return b""


def _bytes_moved(pid: int) -> int:
    """Bytes that a process has read from and written to storage."""
    total = 0
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(": ")
            if name in ("read_bytes", "write_bytes"):
                total += int(value)
    return total


def _state(pid: int) -> str:
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) <= STATE or fields[STATE] in "ZX" else fields[STATE]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
