"""Ties a child's life to its parent's, and makes orphans come back to this process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> Callable[[], None] | None:
    """A function for a child to call between fork and exec: it is killed when this process dies.

    Linux only (None elsewhere). Everything it needs is looked up here, before the fork.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent, kill = ctypes.CDLL(None).prctl, os.getpid(), int(signal.SIGKILL)

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
