"""What a rank's process does before it imports torch: die with its parent, write its own log, answer
signals, import without collecting garbage."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from llmtrain.run.parent import tie_to


def die_with_parent() -> None:
    """Ask the kernel to kill this process when torchrun dies, so that no rank outlives it (Linux)."""
    if tie := tie_to(os.getppid()):
        tie()


def redirect_output(log: Path) -> None:
    """Append standard output and error, of C++ libraries too, to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def dump_stacks_on_signal(path: Path) -> None:
    """Write the stacks of all threads to a file at each SIGUSR1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR1, file=path.open("a", encoding="utf-8"), all_threads=True)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """For imports: what they make stays for good, and looking through it for garbage, over and over, is a
    fifth of their time. It is never looked through again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class StopFlag:
    """Set by SIGTERM: save at the next step boundary and leave."""

    def __init__(self) -> None:
        self.is_set = False

    def listen(self) -> None:
        """Install the handler; main thread only."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        self.is_set = True
