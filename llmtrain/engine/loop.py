"""The training loop of one rank: step, tell, validate, save, until the last step or a wish to stop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from llmtrain.engine.build import Parts
from llmtrain.engine.clock import TraceFile
from llmtrain.engine.micro_batch import MicroBatchControl
from llmtrain.engine.numerics.state import EXTRA_KEY, plain_state
from llmtrain.engine.rank_pace import RankPace
from llmtrain.engine.saver import Saver
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import StepResult, Wishes, train_step, validate
from llmtrain.events.schema import (
    Evaluated,
    Notice,
    Payload,
    PhaseStarted,
    StepFinished,
)
from llmtrain.events.words import LeavesAs
from llmtrain.hardware import ACCELERATORS
from llmtrain.plan.model_size import flops_per_token

COLLECT_EVERY = 50
"""Steps between two garbage collections, on all ranks alike, so that none makes the others wait at another
time."""


class Loop:
    """Trains from some progress on."""

    def __init__(
        self,
        parts: Parts,
        checkpoints: CheckpointFolder,
        emit: Callable[[Payload], None],
        *,
        should_stop: Callable[[], bool],
        peak_flops: float | None,
        trace: TraceFile | None = None,
        micro_batch: MicroBatchControl | None = None,
        between_failures: float = 0.0,
    ) -> None:
        """`peak_flops` of one accelerator, for MFU; None: not told. `trace` takes the recipe's traced
        steps; `micro_batch` may change the micro-batch between two steps; `between_failures`: mean seconds, 0
        when unknown."""
        self._parts, self._emit = parts, emit
        self._should_stop = should_stop
        self._peak, self._trace, self._micro_batch = peak_flops, trace, micro_batch
        self._saver = Saver(parts, checkpoints, emit, between_failures=between_failures)
        self._own_pace = RankPace()
        self.step = 0
        """Step under way, or the last one done."""

    def run(self, progress: Progress) -> LeavesAs:
        """Train, and say why it ended. The last state is saved. Raises NumericError,
        CheckpointError (when the last save fails), and what torch raises."""
        self.step = progress.step
        self._saver.begin(progress.step)
        gc.collect()
        gc.freeze()
        gc.disable()
        self._emit(PhaseStarted(phase="step", step=progress.step + 1))
        while progress.step < self._parts.steps:
            self.step = progress.step + 1
            result = self._train_step()
            progress.step, progress.rate = self.step, result.rate
            progress.consumed_samples += self._parts.recipe.batch.at(self.step)
            progress.extra[EXTRA_KEY] = plain_state(self._parts.guard.state)
            self._tell(result)
            self._trace_if_due()
            if self._micro_batch is not None:
                self._micro_batch.after_step(self.step, result.seconds, progress.extra)
            if self.step % COLLECT_EVERY == 0:
                gc.collect()
            self._validate_if_due()
            if result.wishes.stop and self.step < self._parts.steps:
                self._saver.last(progress)
                return "stopped"
            saved = self._saver.after_step(
                progress, wished=result.wishes.save, snapshot=result.wishes.snapshot
            )
            self._parts.guard.keep(self.step, saved=saved)
        self._saver.last(progress)
        return "completed"

    def _wishes(self) -> Wishes:
        return Wishes(
            stop=self._should_stop(),
            save=self._saver.wishes_save(self.step),
            snapshot=self._saver.wishes_snapshot(self.step),
        )

    def _train_step(self) -> StepResult:
        """One step; again with smaller micro-batches while memory runs out, where that is possible."""
        while True:
            try:
                return train_step(self._parts, self.step, self._wishes())
            except Exception as error:
                self._tell_reactions()
                control = self._micro_batch
                if control is None or not control.shrinks_after(error, self.step):
                    raise

    def _trace_if_due(self) -> None:
        if self._trace is None or self.step not in self._parts.recipe.train.trace_steps:
            return
        try:
            self._trace.append(self._parts.passes.clock.spans(self.step))
        except OSError as error:  # A trace is worth no failed step.
            self._emit(Notice(message=f"step {self.step} was not traced: {error}", level="warning"))

    def _validate_if_due(self) -> None:
        every = self._parts.recipe.data.validation_every
        if self._parts.validation is None or (self.step % every and self.step != self._parts.steps):
            return
        self._emit(PhaseStarted(phase="evaluate", step=self.step))
        started = time.perf_counter()
        found = validate(self._parts)
        if found is not None and self._parts.groups.rank == 0:
            names = [part.corpus for part in self._parts.recipe.data.blend]
            each = {name: loss for name, loss in zip(names, found.corpora, strict=False) if loss is not None}
            seconds = time.perf_counter() - started
            self._emit(Evaluated(step=self.step, loss=found.loss, seconds=seconds, corpora=each))
        self._emit(PhaseStarted(phase="step", step=self.step + 1))

    def _tell(self, result: StepResult) -> None:
        parts = self._parts
        if parts.groups.rank == 0:
            self._emit(self._step_finished(result))
            self._tell_reactions()
        own = self._own_pace.add(result, parts.device.peak_memory)
        if own is not None:
            self._emit(own)

    def _tell_reactions(self) -> None:
        """Rank 0 tells what all ranks found and did about the step's numbers."""
        if self._parts.groups.rank == 0:
            for payload in self._parts.guard.events:
                self._emit(payload)
            self._parts.guard.events = []

    def _step_finished(self, result: StepResult) -> StepFinished:
        recipe = self._parts.recipe
        tokens = recipe.batch.at(result.step) * recipe.model.sequence
        speed = tokens / result.seconds
        mfu = None
        if self._peak:
            mfu = speed * flops_per_token(recipe.model) / (self._peak * self._parts.layout.world_size)
        return StepFinished(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.rate,
            seconds=result.seconds,
            tokens=tokens,
            tokens_per_second=speed,
            mfu=mfu,
            first_sample=recipe.batch.samples_before(result.step),
            samples=recipe.batch.at(result.step),
            data_digest=result.data_digest,
            data_seconds=result.data_seconds,
        )


def peak_flops(accelerator: object, mode: str) -> float | None:
    """Matrix peak of a profile's accelerator; None where the table has none."""
    if isinstance(accelerator, str):
        known = ACCELERATORS.get(accelerator)
        return known.peak(mode) if known else None
    peak = getattr(accelerator, "peak_flops", None)
    return float(peak) if peak else None
