"""Ranks that are slow, hang, fail or die on purpose, for rehearsals: only what the recipe's `faults.inject`
lists."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence

from llmtrain.config.numerics import InjectedFault

HANG_SECONDS = 3600.0
LASTING = ("slow", "slow_disk")
"""What no restart cures."""


class InjectedError(RuntimeError):
    """What the fault `error` raises."""


class Disturbance:
    """The faults that this rank meets by itself, at the beginning of a step."""

    def __init__(self) -> None:
        self._faults: tuple[InjectedFault, ...] = ()
        self.attempt = 1
        """Number of the run's attempt."""
        self._is_disk_full = False
        self._disk_delay = 0.0

    def prepare(self, faults: Sequence[InjectedFault], rank: int, attempt: int) -> None:
        """Keep the faults of this rank. All but slow ones happen once, in the first attempt: a restart cures
        them."""
        self.attempt = attempt
        self._faults = tuple(
            fault for fault in faults if fault.rank == rank and (attempt == 1 or fault.kind in LASTING)
        )

    def begin_step(self, step: int) -> None:
        """Do what is due in a step. Raises InjectedError and MemoryError."""
        due = [fault for fault in self._faults if fault.step <= step < fault.step + fault.steps]
        self._is_disk_full = any(fault.kind == "full_disk" for fault in due)
        self._disk_delay = sum(fault.seconds for fault in due if fault.kind == "slow_disk")
        # The step may be done again with a smaller micro-batch, which must have room.
        self._faults = tuple(
            fault for fault in self._faults if fault not in due or fault.kind != "out_of_memory"
        )
        for fault in due:
            _happen(fault, step)

    def before_write(self) -> None:
        """A save is about to write, in its thread: wait while the disk is slow on purpose. Raises OSError
        while it is full on purpose."""
        if self._disk_delay > 0.0:
            time.sleep(self._disk_delay)
        if self._is_disk_full:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (on purpose)")


def _happen(fault: InjectedFault, step: int) -> None:
    match fault.kind:
        case "slow":
            time.sleep(fault.seconds)
        case "hang":
            while True:
                time.sleep(HANG_SECONDS)
        case "error":
            raise InjectedError(f"an error on purpose in step {step}")
        case "out_of_memory":
            raise MemoryError(f"no memory is left, on purpose, in step {step}")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:  # what the numbers meet is not this rank's own
            pass


disturbance = Disturbance()
"""A process is one rank."""
