"""The rank processes of one node: found among torchrun's children, watched through pidfds, ended for good.

A pidfd becomes readable in the instant its process dies. The exit status, which only the parent may ask for,
is then in /proc while the process is a zombie (torchrun collects it every 0.1 s); newer kernels (6.15) tell
it through the pidfd after that, and with older ones torchrun's own report is the last resort.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

EXIT_STATUS_FIELD = 49
"""Position of the wait status in /proc/PID/stat after the command name (proc(5): field 52)."""
PIDFD_GET_INFO = 0xC040FF0B
"""ioctl on a pidfd: `struct pidfd_info` in its first version, 64 bytes (linux/pidfd.h)."""
PIDFD_INFO_EXIT = 1 << 3
PIDFD_INFO_SIZE, PIDFD_EXIT_OFFSET = 64, 60
FAILURE_LINE = re.compile(rb"exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
"""How torchrun reports a worker that failed."""


@dataclass(slots=True)
class RankProcess:
    """One rank of this node."""

    rank: int
    pid: int
    pidfd: int | None
    """None where the kernel has no pidfds; the process is then looked at every tick. Stays open until the
    agent leaves: the agent's selector knows it by its number."""
    asked: bool = False
    """Whether it was asked to leave."""


class Ranks:
    """Ranks of one node script that were seen and have not ended."""

    def __init__(self) -> None:
        self.alive: dict[int, RankProcess] = {}
        self.known: set[int] = set()
        """Pids of all ranks ever seen."""

    def discover(self, script: int) -> Iterator[RankProcess]:
        """Ranks that appeared among the children of torchrun (`script`) since the last call."""
        try:
            children = psutil.Process(script).children()
        except psutil.Error:
            return
        for child in children:
            if child.pid in self.known or (rank := _rank_of(child)) is None:
                continue
            self.known.add(child.pid)
            process = RankProcess(rank=rank, pid=child.pid, pidfd=open_pidfd(child.pid))
            self.alive[child.pid] = process
            yield process

    def ended(self) -> Iterator[tuple[RankProcess, int | None]]:
        """Ranks that ended since the last call, with their exit code where it could still be read."""
        for process in list(self.alive.values()):
            state, status = _state_and_status(process.pid)
            if not (_is_ready(process.pidfd) if process.pidfd is not None else state in ("", "Z", "X")):
                continue
            del self.alive[process.pid]
            yield process, _exit_code(process, status)

    def ask_to_leave(self) -> None:
        """SIGTERM to every rank that was not asked yet."""
        for process in self.alive.values():
            if not process.asked:
                process.asked = True
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def dump_stacks(self) -> None:
        """SIGUSR1 to every rank."""
        for process in self.alive.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class ReportedFailure:
    """A failed worker in torchrun's own words."""

    local_rank: int
    pid: int
    exit_code: int


def failures_in_log(text: bytes) -> list[ReportedFailure]:
    """Workers that torchrun reported as failed."""
    return [
        ReportedFailure(local_rank=int(local_rank), pid=int(pid), exit_code=int(code))
        for code, local_rank, pid in FAILURE_LINE.findall(text)
    ]


def last_lines(path: Path, count: int, limit: int = 1 << 16) -> tuple[str, ...]:
    """The last lines of a log that may not exist; broken bytes are replaced."""
    return tuple(tail_bytes(path, limit).decode("utf-8", "replace").splitlines()[-count:])


def tail_bytes(path: Path, limit: int = 1 << 16) -> bytes:
    """The last bytes of a file that may not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit)
    except OSError:
        return b""


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and all its descendants; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _rank_of(child: psutil.Process) -> int | None:
    """The global rank of a torchrun worker; None for other children, and between its fork and its exec."""
    try:
        environment = child.environ()
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        return int(environment["RANK"])
    except (psutil.Error, OSError, KeyError, ValueError):
        return None


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends; None where there is none to be had."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _is_ready(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended; unlike its pid, it is never handed out again."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _state_and_status(pid: int) -> tuple[str, int | None]:
    """State letter and wait status of a process; an empty state when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    fields = text[text.rfind(")") + 2 :].split()
    return fields[0], int(fields[EXIT_STATUS_FIELD]) if fields[0] in "ZX" else None


def _exit_code(process: RankProcess, status: int | None) -> int | None:
    """Exit code, from /proc's wait status or the kernel; None when it was collected and the kernel is old.

    Collects the process when its parent died and left it to us.
    """
    with suppress(ChildProcessError):
        collected, own = os.waitpid(process.pid, os.WNOHANG)
        status = own if collected else status
    if status is None and process.pidfd is not None:
        status = _status_of_collected(process.pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _status_of_collected(pidfd: int) -> int | None:
    """Wait status of a process that its parent has collected; None on kernels that do not keep it."""
    info = bytearray(PIDFD_INFO_SIZE)
    struct.pack_into("=Q", info, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("=Q", info)[0] & PIDFD_INFO_EXIT:
        return None
    status: int = struct.unpack_from("=i", info, PIDFD_EXIT_OFFSET)[0]
    return status
