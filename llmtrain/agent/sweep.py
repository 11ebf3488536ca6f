"""Find and end processes of earlier attempts of one run on this machine, and of nothing else.

A process belongs to a run when its environment carries the run's marker (the node script exports it, every
descendant inherits it), or when it is an agent of that run. Supervisors, editors, and the ranks of other runs
do not match, even of a run with the same name elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from llmtrain.run.markers import ATTEMPT_MARKER, RUN_MARKER, STANDBY_MARKER

AGENT_MODULE = "llmtrain.agent"
KILL_SECONDS = 5.0
"""Longest wait for killed processes to vanish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep did."""

    left_by_themselves: int
    killed: tuple[int, ...]
    remaining: tuple[int, ...]
    """Processes that not even SIGKILL ended in time (uninterruptible sleep)."""


def leftovers(run: Path, older_than: int | None = None, *, standby_too: bool = False) -> list[psutil.Process]:
    """Processes of a run on this machine, but for the caller and its ancestors; with `older_than` only those
    of earlier attempts, and with `standby_too` those that were started to wait for this one."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        attempt = None if process.pid in own else _attempt_of(process, str(run), standby_too)
        if attempt is not None and (older_than is None or attempt < older_than):
            found.append(process)
    return found


def sweep(
    run: Path, *, older_than: int | None = None, grace: float = 0.0, standby_too: bool = False
) -> Swept:
    """Wait up to `grace` seconds while an agent is among the leftovers, since it lets its ranks save and
    then ends them; kill what is left, and make sure."""
    deadline = time.monotonic() + grace
    first = found = leftovers(run, older_than, standby_too=standby_too)
    while any(_is_agent(process) for process in found) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [process for process in found if is_running(process)] or leftovers(
            run, older_than, standby_too=standby_too
        )
    killed = kill_all(found)
    remaining = tuple(process.pid for process in leftovers(run, older_than, standby_too=standby_too))
    return Swept(
        left_by_themselves=len({process.pid for process in first} - set(killed)),
        killed=killed,
        remaining=remaining,
    )


def kill_all(processes: Iterable[psutil.Process], seconds: float = KILL_SECONDS) -> tuple[int, ...]:
    """SIGKILL processes and wait for them to vanish; the pids that were killed."""
    killed = []
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
            killed.append(process)
    deadline = time.monotonic() + seconds
    while any(is_running(process) for process in killed) and time.monotonic() < deadline:
        time.sleep(0.01)
    return tuple(process.pid for process in killed)


def _is_agent(process: psutil.Process) -> bool:
    try:
        return AGENT_MODULE in process.cmdline() and is_running(process)
    except psutil.Error:
        return False


def is_running(process: psutil.Process) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _attempt_of(process: psutil.Process, run: str, standby_earlier: bool) -> int | None:
    """Attempt of the run that a live process belongs to; None when it belongs to another run or to none. With
    `standby_earlier`, a process that was started in standby belongs to the attempt before."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        argv = process.cmdline()
        if AGENT_MODULE in argv and _after(argv, "--run-dir") == run:
            return int(_after(argv, "--attempt") or "")
        environment = process.environ()
        if environment.get(RUN_MARKER) != run:
            return None
        return int(environment[ATTEMPT_MARKER]) - (standby_earlier and STANDBY_MARKER in environment)
    except (psutil.Error, OSError, KeyError, ValueError):
        return None


def _after(argv: list[str], option: str) -> str | None:
    position = argv.index(option) + 1 if option in argv else len(argv)
    return argv[position] if position < len(argv) else None
