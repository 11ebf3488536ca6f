"""How long this thread stood in line for a core: runnable, and not run."""

from __future__ import annotations

import os
from contextlib import suppress

PLACE = "/proc/thread-self/schedstat"
"""Nanoseconds on a core, nanoseconds in line, a count (Linux, Documentation/scheduler/sched-stats.rst)."""
LONGEST_LINE = 128


class RunQueue:
    """Of the thread that asks first, which is the one that computes; 0 where the kernel does not say."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._is_asked = False

    def seconds(self) -> float:
        """Since the thread began."""
        if not self._is_asked:
            self._is_asked = True
            with suppress(OSError):
                self._file = os.open(PLACE, os.O_RDONLY | os.O_CLOEXEC)
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, LONGEST_LINE, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0


run_queue = RunQueue()
"""A process is one rank."""
