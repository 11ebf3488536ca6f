"""Up the ladder again: while an attempt trains on a lower rung, nodes that come back are looked for, and the
attempt is ended in order, at a convenient moment, for one on more of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from llmtrain.config.layout import Layout
from llmtrain.events.state import RunState
from llmtrain.events.words import GainCause
from llmtrain.run.record import AttemptRecord, RunRecord
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.decision.failure_rate import expected_between
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.nodes.members import Members
from llmtrain.supervise.session import Session

STEPPED_UP: GainCause = "step_up"
"""Cause of an attempt's end that nothing was wrong with."""
REPLACED: GainCause = "replace_slow"
"""Cause of an attempt's end that was left for one without a slow node."""
FOR_GAIN = (STEPPED_UP, REPLACED)
LONGEST_BACK_OFF = 32
"""Times the first one; it doubles with every step up."""


def may_restart_for_gain(attempts: Sequence[AttemptRecord], now: float, back_off: float) -> bool:
    """Whether the last restart without a failure is long enough ago: `back_off` seconds, and twice as long
    after each further one, so that a node that comes and goes costs few. `now`: epoch seconds; an end far in
    the future was noted while a clock was wrong."""
    ended = [attempt.ended or now for attempt in attempts if attempt.cause in FOR_GAIN]
    return not ended or abs(now - ended[-1]) >= back_off * min(LONGEST_BACK_OFF, 2 ** (len(ended) - 1))


def pays(now: Layout, better: Layout, global_batch: int, between: float, cost: float) -> bool:
    """Whether another layout saves more than the `cost` of a restart in the mean time `between` two failures,
    after which there would be one anyway. Seconds."""
    return between * (1.0 - relative_time(better, now, global_batch)) > cost


def relative_time(layout: Layout, other: Layout, global_batch: int) -> float:
    """Time of a step in a layout over that in another one with the same stages: the replica with most
    micro-batches decides, and its pipeline has to be filled too."""

    def slots(each: Layout) -> float:
        return (max(each.micro_batches(global_batch)) + each.pp - 1) * each.micro_batch / each.pp / each.tp

    return slots(layout) / slots(other)


class StepUp:
    """Watches for better times during one attempt on a lower rung.

    `find` tells what a new attempt would gain from nodes that are fit again, or nothing; it may take its
    time, and runs beside the watch.
    """

    def __init__(self, find: Callable[[], str], limits: Limits) -> None:
        self._find, self._limits = find, limits
        self._look: threading.Thread | None = None
        self._next_look = time.monotonic() + limits.step_up_look
        self._gain, self._gained_at, self._checkpoint = "", 0.0, 0

    def due(self, state: RunState) -> str:
        """What is to be gained by ending the attempt now; empty: nothing, or a better moment will come.

        The better moment is the end of the next save, since then little is left to save; a run that saves
        rarely does not wait for it for long.
        """
        now = time.monotonic()
        if self._gain:
            newest = max((point.step for point in state.checkpoints), default=0)
            is_late = now - self._gained_at >= self._limits.step_up_wait
            return self._gain if newest > self._checkpoint or is_late else ""
        if self._look is None:
            if now >= self._next_look:
                self._checkpoint = max((point.step for point in state.checkpoints), default=0)
                self._look = threading.Thread(target=self._ask, name="nodes-back", daemon=True)
                self._look.start()
        elif not self._look.is_alive():
            self._look, self._next_look = None, now + self._limits.step_up_look
        return ""

    def _ask(self) -> None:
        """A look that fails is one that found nothing: the attempt that trains must not notice."""
        try:
            gain = self._find()
        except Exception:
            return
        if gain:
            self._gained_at, self._gain = time.monotonic(), gain


def watch_for_nodes(
    session: Session, members: Members, record: RunRecord, plan: AttemptPlan
) -> StepUp | None:
    """What looks for nodes that come back, for an attempt on a lower rung; None for one on the highest."""
    if not plan.rung:
        return None
    job, limits = session.job, session.limits
    failures, batch = job.spec.cluster.failures, job.spec.recipe.batch.global_size
    between = expected_between(record.attempts, failures.node_mtbf, len(plan.nodes))

    def does_pay(better: Layout) -> bool:
        return pays(plan.layout, better, batch, between, failures.restart)

    def gain() -> str:
        if not may_restart_for_gain(record.attempts, time.time(), limits.step_up_back_off):
            return ""
        return members.gain(record, plan.rung, does_pay)

    return StepUp(gain, limits)
