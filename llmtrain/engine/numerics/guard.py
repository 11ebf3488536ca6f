"""One rank's guard over the numbers: it asks the pure rules what to do about a step, does it, and keeps what
is to be told.

All ranks hold the same state and see the same agreed numbers, so all of them act alike in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.config.layout import Layout
from llmtrain.config.numerics import InjectedFault
from llmtrain.config.recipe import Recipe
from llmtrain.engine.data import Batch
from llmtrain.engine.disturbance import disturbance
from llmtrain.engine.failures import NumericError
from llmtrain.engine.model.stage import ModelStage
from llmtrain.engine.numerics import telling
from llmtrain.engine.numerics.decide import Numbers, Ruling, Verdict, judge, settle
from llmtrain.engine.numerics.faults import InjectedFaults
from llmtrain.engine.numerics.findings import Findings
from llmtrain.engine.numerics.layer_precision import LayerChange, LayerRecord, observe, wide_layers
from llmtrain.engine.numerics.master_weights import everything_in_fp32, layers_in
from llmtrain.engine.numerics.measure import LayerGradient
from llmtrain.engine.numerics.origin import Origin
from llmtrain.engine.numerics.rehearsal import why_idle
from llmtrain.engine.numerics.scaler import ROOM
from llmtrain.engine.numerics.snapshots import Snapshot
from llmtrain.engine.numerics.state import NumericState, clip_limit, fresh_state
from llmtrain.engine.numerics.windows import clip_factor
from llmtrain.engine.optimizer import ShardedAdamW
from llmtrain.engine.parallel.buckets import Buckets
from llmtrain.engine.parallel.groups import Groups
from llmtrain.events.reactions import LASTING_FAULTS, CorruptionFound, FaultInjected
from llmtrain.events.schema import Payload

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}

Reload = Callable[[], tuple[int, int, str]]
"""Give all ranks the newest checkpoint's weights; return its step, its updates, and its name or `seed`."""


class Guard:
    """Reactions of one rank."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        stages: Sequence[ModelStage],
        *,
        buckets: Buckets,
        optimizer: ShardedAdamW,
        groups: Groups,
    ) -> None:
        self._recipe, self._stages, self._buckets, self._optimizer = recipe, stages, buckets, optimizer
        self._layout = layout
        # The faults' hooks come first, so that the probe sees what they did.
        self._faults = InjectedFaults(recipe.faults.inject, stages, buckets, groups, recipe.model.vocab)
        self._findings = Findings(recipe, layout, stages, buckets, groups)
        self._told: set[InjectedFault] = set()
        """Lasting faults that were told of."""
        self._snapshot = Snapshot(buckets) if recipe.stability.snapshot_every else None
        self._origin, self._first_origin = Origin(), Origin()
        self._first: Ruling | None = None
        self.reload: Reload | None = None
        """How to go back to a checkpoint; None: there is none."""
        self.state = fresh_state(recipe)
        """The same on all ranks; part of every checkpoint."""
        self.events: list[Payload] = []
        """What rank 0 is to tell of the step."""

    # ---- before and during a pass
    def begin_step(self, step: int) -> None:
        """A step begins."""
        self.events, self._first = [], None
        self._origin = self._first_origin = Origin()
        for fault in self._faults.begin_step(step):
            if why_idle(fault, self._recipe.model, self._layout, disturbance.attempt):
                continue
            if fault.kind in LASTING_FAULTS:
                if fault in self._told:
                    continue
                self._told.add(fault)
            self.events.append(FaultInjected(step=step, fault=fault.kind, rank=fault.rank, layer=fault.layer))

    def begin_pass(self, layout: Layout) -> None:
        """A pass of the step begins, in a layout whose micro-batch may be another than before."""
        self._findings.begin_pass(layout)
        self._faults.begin_pass()

    def spoil(self, batch: Batch) -> Batch:
        """The batch that is to be read: the given one, but in a rehearsal of a bad batch."""
        return self._faults.spoil(batch)

    def formats(self, *, fp32: bool = False) -> AbstractContextManager[None]:
        """Weights and layers in the formats of a pass: all in FP32, or as the layers' records say."""
        if fp32:
            return everything_in_fp32(self._stages, self._buckets)
        wide = wide_layers(self.state.layers)
        return layers_in(self._stages, self._buckets, wide, FORMATS[self._fallback])

    @property
    def _fallback(self) -> str:
        precision = self._recipe.precision
        return "fp32" if precision.mode == "bf16" else precision.layers.fallback

    def replicas_differ(self, step: int) -> bool:
        """Whether this rank's replicas compute with different weights."""
        return self._findings.replicas_differ(step)

    # ---- after a pass
    def judge(self, seen: Numbers, loss: Tensor | None, *, recomputed: bool = False) -> Ruling:
        """The ruling on a pass. `loss` is this rank's own. Raises NumericError, on all ranks, when the run is
        to stop."""
        if seen.corrupt and not recomputed:
            self.events += self._findings.corruption(seen.step)
        if not seen.finite:
            self._origin = self._findings.locate(seen.step, loss)
            self._buckets.forget_errors()
        ruling = judge(self._recipe, self.state, seen, recomputed=recomputed)
        if not recomputed:
            self._first, self._first_origin = ruling, self._origin
        elif self._first is not None and self._first.reason:
            self.events.append(telling.tell_recomputed(self._first.reason, seen, self._first_origin))
        if ruling.verdict is Verdict.STOP:
            raise NumericError(self._last_words(seen, ruling), hint=_hint(ruling))
        return ruling

    def clip_factor(self, seen: Numbers, scale: float) -> float:
        """Factor for the reduced gradients, which hold `scale` times the true ones."""
        return clip_factor(seen.grad_norm, clip_limit(self._recipe, self.state)) / scale

    def measure(self, step: int, scale: float) -> tuple[LayerGradient, ...]:
        """What the gradients look like, before they are clipped, when it is time to look."""
        return self._findings.measure(step, scale)

    def settle(self, seen: Numbers, ruling: Ruling, measured: Sequence[LayerGradient]) -> None:
        """Take note of a step whose numbers these are, once its update is done or left out."""
        recipe, before, first = self._recipe, self.state, self._first or ruling
        config, mode = recipe.stability.monitor, recipe.precision.mode
        self.events += telling.tell_gradients(seen.step, measured, mode, config.alarm_share)
        self.events += telling.tell_ruling(recipe, seen, ruling, self._origin)
        alarmed = {one.layer for one in measured if one.abnormal(mode) > config.alarm_share}
        clean = first.verdict is Verdict.APPLY and not ruling.spikes
        state = settle(recipe, before, seen, ruling, overflow=_went_wrong(first), clean=clean)
        layers, changes = self._observe_layers(seen.step, alarmed, cured=ruling.verdict is Verdict.APPLY)
        self.state = replace(state, layers=layers)
        self.events += telling.tell_scale(seen.step, before, self.state)
        self.events += telling.tell_layers(seen.step, changes, mode, self._fallback)
        if self.state.scale != before.scale:
            self._buckets.forget_errors()  # They are multiples of the old scale.
        if ruling.verdict is Verdict.REWIND:
            self._rewind(seen.step, ruling)

    def _observe_layers(
        self, step: int, alarmed: set[str], *, cured: bool
    ) -> tuple[dict[str, LayerRecord], tuple[LayerChange, ...]]:
        """Layers' records, and what changes. Blocks only: the ends of the model keep their format."""
        precision = self._recipe.precision
        if precision.mode not in ("fp16", "bf16"):
            return self.state.layers, ()
        # What FP32 has cured was too much for the format; at a large scale, only for the scale.
        if cured and self._first_origin.layer and self.state.scale <= ROOM:
            alarmed = alarmed | {self._first_origin.layer}
        blocks = {layer for layer in alarmed if layer.startswith("layers.")}
        return observe(self.state.layers, precision.layers, step, blocks)

    def _rewind(self, step: int, ruling: Ruling) -> None:
        """Go back to the newest snapshot, or else checkpoint; steps and data go on."""
        before = self.state
        if self._snapshot is not None:
            self._snapshot.put_back()
            to_step, updates, source = self._snapshot.step, self._snapshot.updates, "memory"
        elif self.reload is not None:
            to_step, updates, source = self.reload()
        else:
            to_step, updates, source = step - 1, before.updates, "memory"
        self._optimizer.set_step(updates)
        self._buckets.forget_errors()
        self._buckets.publish()
        self.state = replace(before, updates=updates)
        self.events += telling.tell_rewind(self._recipe, (to_step, step), source, ruling.reason, self._origin)

    def keep(self, step: int, *, saved: bool = False) -> None:
        """Take a snapshot after a step, where they are wanted: every few steps, and of what a checkpoint
        holds, so that a run that restarts from it goes back to the same."""
        every = self._recipe.stability.snapshot_every
        if self._snapshot is not None and every and (saved or step % every == 0):
            self._snapshot.take(step, self.state.updates)

    def resume(self, state: NumericState, step: int) -> None:
        """Go on after a step, from what a checkpoint holds."""
        self.state = state
        self._optimizer.set_step(state.updates)
        self.keep(step, saved=True)

    def _last_words(self, seen: Numbers, ruling: Ruling) -> str:
        if ruling.reason == "corruption":
            found = [event for event in self.events if isinstance(event, CorruptionFound)]
            ranks = sorted({rank for event in found for rank in event.ranks})
            return f"step {seen.step}: weights differ between replicas, ranks {', '.join(map(str, ranks))}"
        tried = self.state.skipped_in_a_row
        before = f"; {tried} steps before it were skipped" if tried else ""
        before += f", {self.state.rewinds} rewinds did not help" if self.state.rewinds else ""
        return (
            f"step {seen.step}: loss {seen.loss} and gradient norm {seen.grad_norm} are not both finite, "
            f"first in {self._origin.words()}{before}"
        )


def _went_wrong(ruling: Ruling) -> bool:
    return ruling.reason in ("overflow", "nonfinite")


def _hint(ruling: Ruling) -> str:
    if ruling.reason == "corruption":
        return "have the memory of these ranks' nodes checked; the weights were not changed"
    return (
        "look at these samples; launch anew with a lower learning_rate.peak, or move the newest checkpoints "
        "out of the run's checkpoints/ and `llmtrain resume` it; the weights were not changed"
    )
