"""The kernel's word on GPUs and memory: its log, where it may be read, and counts of control groups.

A process that is killed for memory leaves no word of its own. The log tells people most; the counts can be
read by everybody, and are those of just the groups that the ranks are in.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from llmtrain.agent.room import cgroups_of

WORTH_TELLING = re.compile(
    r"NVRM: Xid|out of memory|oom-kill|oom_reaper|Killed process|Memory cgroup out of memory"
    r"|Hardware Error|mlx5.*(?:error|failed)|nvme.*(?:I/O error|timeout)|EXT4-fs error|XFS.*Corruption"
    r"|NFS: .*not responding|nfs: server .* not responding|LustreError",
    re.IGNORECASE,
)
LINES = 20
LONGEST_RECORD = 8192
LOG = Path("/dev/kmsg")


class KernelWord:
    """What the kernel says from now on."""

    def __init__(self) -> None:
        # Not by the time: the log's own clock is minutes away from others after months without a boot.
        self._last_before = max((number for number, _ in _records()), default=-1)
        self._kills_before: dict[Path, int] = {}
        self.watch("self")

    def watch(self, pid: int | str) -> None:
        """Look at the control groups of one more process, which need not be this one's."""
        for folder in cgroups_of(pid):
            if folder not in self._kills_before:
                self._kills_before[folder] = _oom_kills(folder)

    def lines(self) -> tuple[str, ...]:
        """The last lines worth telling; none where the log may not be read."""
        new = (text for number, text in _records() if number > self._last_before)
        return tuple([text for text in new if WORTH_TELLING.search(text)][-LINES:])

    def oom_kills(self) -> int:
        """Processes that were killed for memory in one of the groups, or in one above it."""
        before = self._kills_before
        return max((_oom_kills(folder) - known for folder, known in before.items()), default=0)


def _oom_kills(folder: Path) -> int:
    """Since the group was made. Version 2 counts those of groups below it too."""
    for name in ("memory.events", "memory.oom_control"):
        with suppress(OSError, ValueError):
            text = (folder / name).read_text(encoding="ascii")
            counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
            return int(counts.get("oom_kill", 0))
    return 0


def _records() -> list[tuple[int, str]]:
    """(sequence number, text) of all records in the kernel's ring."""
    try:
        descriptor = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    found: list[tuple[int, str]] = []
    try:
        while True:
            try:
                record = os.read(descriptor, LONGEST_RECORD).decode("utf-8", "replace")
            except BrokenPipeError:  # The ring has overwritten what came next; the following read goes on.
                continue
            except OSError:
                return found
            if not record:
                return found
            head, _, text = record.partition(";")
            fields = head.split(",")
            if len(fields) > 1 and fields[1].isdigit():
                found.append((int(fields[1]), text.splitlines()[0] if text else ""))
    finally:
        os.close(descriptor)
