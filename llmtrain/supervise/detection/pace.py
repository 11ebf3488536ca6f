"""How long the phases of a run take, and the limits that follow: generous before anything is known, from
measured times afterwards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmtrain.events.event import Event
from llmtrain.events.schema import CheckpointCommitted, Evaluated, PhaseStarted, StepFinished
from llmtrain.events.words import Phase
from llmtrain.supervise.detection.limits import PHASE_SECONDS

MEASURED_STEPS = 512
"""Newest steps of an attempt that its step limit follows."""
STEPS_BEFORE = 20
"""Steps of an attempt before it does: the first ones compile, allocate and fill caches."""
STEP_FACTOR, STEP_FLOOR = 3.0, 8.5
"""Limit of a silent step: so many times the 99th percentile, but not less than so many seconds. The floor
leaves 1.5 s for the agents' answers, so that a hang is known within 10 s."""
PHASE_FACTOR = 10.0
"""Limit of another phase: so many times the slowest one measured."""
PHASE_FLOORS: Mapping[Phase, float] = {
    "start": 120.0,
    "build": 120.0,
    "load": 300.0,
    "evaluate": 60.0,
    "checkpoint": 180.0,
    "finish": 180.0,
}
"""But not less than so many seconds: storage has bad days. Where a phase's generous limit was widened, as for
a checkpoint that takes the storage long, this is so in proportion: a first load may have read nothing."""


@dataclass(slots=True)
class Pace:
    """Durations measured in the attempt under way, and the slowest of each phase in the whole run."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_STEPS))
    slowest: dict[Phase, float] = field(default_factory=dict)
    _phase_since: dict[Phase, float] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        """Take in an event of a rank."""
        match event.payload:
            case StepFinished(seconds=seconds) if math.isfinite(seconds):
                self.steps.append(seconds)
            case Evaluated(seconds=seconds):
                self._note("evaluate", seconds)
            case CheckpointCommitted(seconds=seconds):
                self._note("checkpoint", seconds)
                self._note("finish", seconds)
            case PhaseStarted(phase=phase) if event.rank == 0:
                for before, since in self._phase_since.items():
                    self._note(before, event.time - since)
                self._phase_since = {phase: event.time} if phase in ("start", "build", "load") else {}

    def for_next_attempt(self) -> Pace:
        """What stays true: steps may take another time in another layout, so they are measured anew."""
        return Pace(slowest=dict(self.slowest))

    def limit(self, phase: Phase, generous: float) -> float:
        """Longest silence in a phase; never more than the generous limit, seconds."""
        if phase == "step":
            if len(self.steps) < STEPS_BEFORE:
                return generous
            return min(generous, max(STEP_FLOOR, STEP_FACTOR * self.slow_step()))
        measured, floor = self.slowest.get(phase), PHASE_FLOORS.get(phase)
        if measured is None or floor is None:
            return generous
        widened = max(1.0, generous / PHASE_SECONDS[phase])
        return min(generous, max(floor * widened, PHASE_FACTOR * measured))

    def slow_step(self) -> float:
        """99th percentile of the measured steps, seconds; 0 before any."""
        ordered = sorted(self.steps)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    def _note(self, phase: Phase, seconds: float) -> None:
        if math.isfinite(seconds):
            self.slowest[phase] = max(seconds, self.slowest.get(phase, 0.0))
