"""Ties a process's life to its parent's, so that none outlives who started it. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def tie_to(parent: int) -> Callable[[], None] | None:
    """A function for a child of `parent` to call: it is killed when that process dies. None elsewhere.

    Everything that it needs is looked up here, so that it may also be called between fork and exec.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, kill = ctypes.CDLL(None).prctl, int(signal.SIGKILL)

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # The parent died before the call could take effect.
            os._exit(128 + kill)

    return tie


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be reaped here; containers
    often have no init that would."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
