"""When the timer wants a checkpoint: after a fixed time, or after one that follows what saves cost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.events.saving import SaveIntervalSet
from llmtrain.events.schema import Payload
from llmtrain.events.words import IntervalSource
from llmtrain.plan.save_interval import UNMEASURED, save_interval

REMEMBERED = 8
"""Newest saves that the interval follows."""
WORTH_CHANGING = 1.25
"""Factor by which another interval must differ to be taken, and told: near the best one, the cost hardly
depends on it."""


class SaveTimer:
    """The clock of one attempt's saves, on rank 0."""

    def __init__(self, config: CheckpointConfig, between: float, emit: Callable[[Payload], None]) -> None:
        """`between`: mean seconds between two failures of the run; 0: unknown."""
        self._is_adaptive = config.every == "auto" and config.every_steps is None
        default = save_interval((), (), between) if self._is_adaptive else UNMEASURED
        self.interval = default if config.every == "auto" else float(config.every)
        """Seconds between two saves; 0: the timer is off."""
        self._every_steps, self._between, self._emit = config.every_steps, between, emit
        self._source: IntervalSource = "fixed"
        if config.every == "auto":
            self._source = "default" if default == UNMEASURED else "expected"
        self._stalls: deque[float] = deque(maxlen=REMEMBERED)
        self._writes: deque[float] = deque(maxlen=REMEMBERED)
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
        if not self._is_adaptive or self._between <= 0.0:
            return
        wanted = save_interval(self._stalls, self._writes, self._between)
        low, high = sorted((wanted, self.interval))
        if self._source != "measured" or high > WORTH_CHANGING * low:
            self.interval, self._source = wanted, "measured"
            self.tell()

    def tell(self) -> None:
        """Say which interval it is, and where it comes from."""
        is_measured, follows_failures = self._source == "measured", self._source in ("expected", "measured")
        self._emit(
            SaveIntervalSet(
                every_steps=self._every_steps,
                seconds=self.interval,
                source=self._source,
                stall_seconds=fmean(self._stalls) if is_measured else 0.0,
                between_failures=self._between if follows_failures else 0.0,
            )
        )
