"""Storage that takes nothing for a while: it is full, over its quota, or its server is away."""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from llmtrain.supervise.control import Control

PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO)
"""What storage says that may work again."""
PATIENCE = 900.0
"""Longest wait for it, seconds; then the run ends."""
FIRST_LOOK, LONGEST_LOOK = 1.0, 15.0
"""Seconds between two looks; each takes twice as long as the one before."""
ROOM = 1 << 18
"""Bytes that records, their copies and the next attempt's files take."""


def may_pass(error: OSError) -> bool:
    """Whether waiting may help."""
    return error.errno in PASSING


def wait_for_storage(folder: Path, control: Control, patience: float = PATIENCE) -> bool:
    """Wait until a folder takes files again; False when that takes longer than `patience` seconds, or when a
    stop is wanted."""
    deadline, pause = time.monotonic() + patience, FIRST_LOOK
    while time.monotonic() < deadline and control.wish() is None:
        if takes_files(folder):
            return True
        control.sleep(pause)
        pause = min(LONGEST_LOOK, 2 * pause)
    return False


def takes_files(folder: Path) -> bool:
    """Whether a file of some size reaches the disk."""
    probe = folder / f".room.{os.getpid()}.tmp"
    try:
        with probe.open("wb") as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.unlink()
    return True


def say(text: str) -> None:
    """A line for the supervisor's log, which may lie on that storage."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
