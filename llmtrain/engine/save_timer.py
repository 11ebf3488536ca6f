"""When the timer wants a checkpoint: after a fixed time, or after one that follows what saves cost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.events.schema import Notice, Payload
from llmtrain.plan.save_interval import UNMEASURED, save_interval
from llmtrain.units import format_duration

REMEMBERED = 8
"""Newest saves that the interval follows."""
TOLD_CHANGE = 1.25
"""Factor by which the interval must change to be told again."""


class SaveTimer:
    """The clock of one attempt's saves, on rank 0."""

    def __init__(self, config: CheckpointConfig, between: float, emit: Callable[[Payload], None]) -> None:
        """`between`: mean seconds between two failures of the run; 0: unknown."""
        self._is_adaptive = config.every == "auto" and config.every_steps is None
        default = save_interval((), (), between) if self._is_adaptive else UNMEASURED
        self.interval = default if config.every == "auto" else float(config.every)
        """Seconds between two saves; 0: the timer is off."""
        self._between, self._emit = between, emit
        self._stalls: deque[float] = deque(maxlen=REMEMBERED)
        self._writes: deque[float] = deque(maxlen=REMEMBERED)
        self._told = 0.0
        self._since = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the time is over."""
        return self.interval > 0 and time.monotonic() - self._since >= self.interval

    def restart(self) -> None:
        """A save begins, or is left out."""
        self._since = time.monotonic()

    def saved(self, stall: float, seconds: float) -> None:
        """A save was committed; the training waited for `stall` of its `seconds`."""
        self._stalls.append(stall)
        self._writes.append(seconds)
        if not self._is_adaptive:
            return
        self.interval = save_interval(self._stalls, self._writes, self._between)
        low, high = sorted((self.interval, self._told))
        if high > TOLD_CHANGE * low:
            self._told = self.interval
            self._emit(Notice(message=self._why()))

    def _why(self) -> str:
        mean = sum(self._stalls) / len(self._stalls)
        if self._between <= 0.0:
            return f"checkpoints every {format_duration(self.interval)}: the failure rate is unknown"
        return (
            f"checkpoints every {format_duration(self.interval)}: the training waits "
            f"{format_duration(mean)} for one, and a failure is expected every "
            f"{format_duration(self._between)} (checkpoint.every: auto)"
        )
