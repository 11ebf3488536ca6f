"""A rank's own times, as means over a few steps: what the supervisor compares ranks by."""

from __future__ import annotations

from collections.abc import Callable

from llmtrain.engine.step import StepResult
from llmtrain.events.schema import RankStep

EVERY = 5
"""Steps of one mean."""


class RankPace:
    """Sums up steps; after the first one, and then every few, there is something to tell."""

    def __init__(self) -> None:
        self._is_first = True
        self._clear()

    def add(self, result: StepResult, memory_bytes: Callable[[], int]) -> RankStep | None:
        """Take in a step; the means since the last time when they are due. The first step, which compiles
        and allocates, is told alone."""
        self._count += 1
        self._seconds += result.seconds
        self._compute += result.compute_seconds
        self._data += result.data_seconds
        self._core_wait += result.core_wait_seconds
        if result.step % EVERY and not self._is_first:
            return None
        told = RankStep(
            step=result.step,
            seconds=self._seconds / self._count,
            compute_seconds=self._compute / self._count,
            data_seconds=self._data / self._count,
            core_wait_seconds=self._core_wait / self._count,
            memory_bytes=memory_bytes(),
            steps=self._count,
        )
        self._clear()
        self._is_first = False
        return told

    def _clear(self) -> None:
        self._count, self._seconds, self._compute, self._data, self._core_wait = 0, 0.0, 0.0, 0.0, 0.0
