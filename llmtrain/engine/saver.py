"""When the state is saved, and what is told about it; the saves themselves run beside the training."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

from llmtrain.engine.build import Parts
from llmtrain.engine.checkpoint.background import BackgroundSaves, Outcome
from llmtrain.engine.save_timer import SaveTimer
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.errors import CheckpointError
from llmtrain.events.schema import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSkipped,
    CheckpointStarted,
    Notice,
    Payload,
    PhaseStarted,
    SnapshotTaken,
)
from llmtrain.events.words import Phase
from llmtrain.run.checkpoints import CheckpointInfo

FIRST_RETRY, LONGEST_RETRY = 1.0, 300.0
"""Seconds until a save that failed is tried again, at the end of a step: the first time and later at once
when a step takes longer, then doubling."""
MOST_DOUBLINGS = 10
"""More of them make no difference; after hours of a full disk, the number would be too large for a float."""

TOLD_SECONDS = 1.0
"""A wait for the save before that is worth telling."""


class Saver:
    """Saves of one attempt. Rank 0 watches the clock and wishes; all ranks act on wishes alike."""

    def __init__(
        self,
        parts: Parts,
        checkpoints: CheckpointFolder,
        emit: Callable[[Payload], None],
        *,
        between_failures: float = 0.0,
    ) -> None:
        """`between_failures`: mean seconds; 0: unknown."""
        self._config, self._is_first = parts.recipe.checkpoint, parts.groups.rank == 0
        self._checkpoints, self._emit, self._guard = checkpoints, emit, parts.guard
        parts.guard.reload = self.reload
        self._saves: BackgroundSaves = checkpoints.in_background()
        self._snapshots = checkpoints.in_memory()
        self._snapshot_fault = ""
        parts.optimizer.before_change = self.before_change
        self._saved_step = -1
        self._timer = SaveTimer(self._config, between_failures, emit)
        self._failures = 0
        self._retry_at = float("inf")

    def begin(self, step: int) -> None:
        """Training begins after a step."""
        if self._is_first:
            self._timer.tell()
        self._saved_step = step if self._checkpoints.restored_from_disk else -1

    def wishes_save(self, step: int) -> bool:
        """Whether rank 0 wants a save after the step that begins: the timer has run out, or one has failed.

        While the save before is still running, one by the timer is left out, and told."""
        if not self._is_first:
            return False
        is_due = self._timer.is_due
        if self._saves.is_busy:
            if is_due:
                self._timer.restart()
                reason = "the one before is still being written"
                self._emit(CheckpointSkipped(step=step, reason=reason))
            return False
        return is_due or time.monotonic() >= self._retry_at

    def wishes_snapshot(self, step: int) -> bool:
        """Whether rank 0 wants a snapshot in host memory after the step that begins; not while the one before
        is still being copied to other nodes."""
        every = self._config.memory.every_steps
        if not self._is_first or self._snapshots is None or every is None or step % every:
            return False
        return not self._snapshots.is_busy

    def after_step(self, progress: Progress, *, wished: bool, snapshot: bool = False) -> bool:
        """Begin a save, and a snapshot, where one is due, after the one before, and say so. A failed one
        costs the run nothing but the checkpoint."""
        takes_snapshot = snapshot and self._snapshots is not None
        every = self._config.every_steps
        by_step = every is not None and progress.step % every == 0
        is_due = (wished or by_step) and self._saved_step != progress.step
        if not is_due and not takes_snapshot:
            return False
        if is_due:
            self._tell_phase("checkpoint", progress.step)
        info = self._checkpoints.info(progress)
        if takes_snapshot and self._snapshots is not None:
            told = partial(self._snapshot_ended, progress.step)
            self._snapshots.start(info, told, own=deepcopy(progress.own))
        if is_due:
            self._start(progress, info, incremental=not by_step)
            self._tell_phase("step", progress.step + 1)
        return True

    def last(self, progress: Progress) -> None:
        """Save the last state, and wait until that is done; raises CheckpointError when it cannot be."""
        self._tell_phase("checkpoint", progress.step)
        self.settle()
        if not self._checkpoints.first_says(self._saved_step == progress.step):
            self._start(progress, self._checkpoints.info(progress), incremental=False, is_waited_for=True)
            outcome = self._saves.wait()
            if isinstance(outcome, CheckpointError):
                raise outcome
        self._tell_phase("finish", progress.step)

    def before_change(self) -> None:
        """The state is about to change: wait for a copy of it that is being made."""
        self._saves.finish_copy()
        if self._snapshots is not None:
            self._snapshots.finish_copy()

    def reload(self) -> tuple[int, int, str]:
        """Give all ranks the weights of the newest checkpoint, or else of the seed; return its step, its
        updates and its name. Raises RestoreError."""
        self.settle()
        if self._snapshots is not None:
            self._snapshots.forget()
        progress, name, _ = self._checkpoints.restore("newest")
        return progress.step, self._guard.state.updates, name or "seed"

    def settle(self) -> None:
        """Wait for the save and the snapshot under way: before the state is taken back to a checkpoint."""
        self._saves.wait()
        if self._snapshots is not None:
            self._snapshots.wait()

    def _start(
        self, progress: Progress, info: CheckpointInfo, *, incremental: bool, is_waited_for: bool = False
    ) -> None:
        step = progress.step
        if self._is_first:
            self._emit(CheckpointStarted(step=step))
        self._timer.restart()

        def told(outcome: Outcome, seconds: float, stall: float) -> None:
            self._ended(outcome, step, seconds, None if is_waited_for else stall)

        waited = self._saves.start(info, told, own=deepcopy(progress.own), incremental=incremental)
        if waited > TOLD_SECONDS and self._is_first:
            text = f"before step {step + 1}, training waited {waited:.1f} s for the checkpoint before"
            self._emit(Notice(message=f"{text} to be written", level="warning"))

    def _ended(self, outcome: Outcome, step: int, seconds: float, stall: float | None) -> None:
        """A save has ended; called in its thread."""
        if isinstance(outcome, CheckpointError):
            delay = retry_delay(self._failures)
            self._failures, self._retry_at = self._failures + 1, time.monotonic() + delay
            if self._is_first:
                self._emit(CheckpointFailed(step=step, error=outcome.text()))
            return
        self._saved_step, self._failures, self._retry_at = step, 0, float("inf")
        if not self._is_first:
            return
        self._emit(
            CheckpointCommitted(
                step=step,
                name=outcome.checkpoint.name,
                bytes=outcome.bytes,
                seconds=seconds,
                stall_seconds=stall,
                is_full=outcome.is_full,
            )
        )
        if stall is not None:  # The last one, which all wait for, says nothing of those beside the training.
            self._timer.saved(stall, seconds)
        try:
            self._checkpoints.prune()
        except CheckpointError as error:
            self._emit(Notice(message=f"old checkpoints stay: {error.text()}", level="warning"))

    def _snapshot_ended(self, step: int, fault: CheckpointError | None, seconds: float, stall: float) -> None:
        """A snapshot has ended; called in its thread. The same fault again is not told again."""
        if not self._is_first:
            return
        if fault is None:
            self._emit(SnapshotTaken(step=step, seconds=seconds, stall_seconds=stall))
        text = "" if fault is None else fault.text()
        kind = text.partition(": ")[2]
        if kind and kind != self._snapshot_fault:
            self._emit(Notice(message=text, level="warning"))
        self._snapshot_fault = kind

    def _tell_phase(self, phase: Phase, step: int) -> None:
        self._emit(PhaseStarted(phase=phase, step=step))


def retry_delay(failures: int) -> float:
    """Seconds until a save is tried again that has failed after so many failures in a row. Pure."""
    return min(LONGEST_RETRY, FIRST_RETRY * 2.0 ** min(failures, MOST_DOUBLINGS))
