"""How long things may take before they count as wrong. Seconds, by the supervisor's own monotonic clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain.config.cluster import PatienceConfig
from llmtrain.events.words import Phase

PHASE_SECONDS: dict[Phase, float] = {
    "start": 300.0,
    "build": 600.0,
    "load": 1800.0,
    "step": 300.0,
    "evaluate": 900.0,
    "checkpoint": 1800.0,
    "finish": 600.0,
}
"""Longest silence of all ranks in each phase; generous, since a false alarm costs a restart."""

SAVE_SECONDS = 120.0
"""That ranks get to save when nobody says how long."""
STEP_FACTOR, SAVE_FACTOR = 20.0, 10.0
"""A step, and a checkpoint that is written or read, may take so many times the predicted duration, when that
is longer than the phase's limit."""
WITH_STATE: tuple[Phase, ...] = ("load", "checkpoint", "finish")
"""Phases in which a whole checkpoint is read or written: that of a large model takes slow storage hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of one attempt."""

    agents_up: float = 60.0
    """From opening the channels to the last agent's first line."""
    ranks_up: float = 300.0
    """From starting the node scripts to the first event of any rank: torchrun and the ranks import torch, all
    at once, perhaps from a slow file system."""
    node_silence: float = 10.0
    """Without a line from an agent that is pinged every second."""
    save: float = SAVE_SECONDS
    """From asking ranks to save and leave to killing them."""
    stacks: float = 2.0
    """For hanging ranks to write their stacks before they are killed."""
    look: float = 0.5
    """For agents to say what they see of their ranks, before these are killed after a failure."""
    tear_down: float = 20.0
    """From the end of `save` to the agents' word that nothing is left; then their channels are cut."""
    quarantine: float = 60.0
    """From a node's first loss to when it may be taken up again; doubles with every further loss of it."""
    look_again: float = 10.0
    """For nodes that may have come back to answer, before an attempt that could use them."""
    step_up_look: float = 30.0
    """Between two looks for nodes that have come back, while an attempt trains on a lower rung."""
    step_up_wait: float = 600.0
    """For the next checkpoint, once the run could step up the ladder."""
    step_up_back_off: float = 600.0
    """From a step up to the next one; doubles with every further one."""
    control_call: float = 0.3
    """For one node to reach another's rendezvous port, at each try."""
    control_retries: int = 3
    """Tries after the first one."""
    phases: Mapping[Phase, float] = field(default_factory=lambda: dict(PHASE_SECONDS))

    def phase(self, name: Phase) -> float:
        """Limit of a phase; the longest one for a phase that this version does not know."""
        return self.phases.get(name, max(self.phases.values()))


def limits_for(
    predicted_step_seconds: float, patience: PatienceConfig | None = None, *, save_seconds: float = 0.0
) -> Limits:
    """Limits that leave room for the plan's predicted step and save, and the profile's for calls between
    nodes."""
    step = max(PHASE_SECONDS["step"], STEP_FACTOR * predicted_step_seconds)
    state = {phase: max(PHASE_SECONDS[phase], SAVE_FACTOR * save_seconds) for phase in WITH_STATE}
    calls = patience or PatienceConfig()
    return Limits(
        phases={**PHASE_SECONDS, **state, "step": step},
        control_call=calls.control,
        control_retries=calls.control_retries,
    )


def predicted_step_seconds(plan_json: Path) -> float:
    """The chosen plan's step time; 0 when plan.json cannot tell (a limit must not depend on it)."""
    return _seconds(plan_json, "plans", 0, "predicted", "step_seconds")


def predicted_save_seconds(plan_json: Path) -> float:
    """The time that a whole checkpoint takes the storage; 0 when plan.json cannot tell."""
    return _seconds(plan_json, "reliability", "checkpoint_seconds")


def _seconds(plan_json: Path, *path: str | int) -> float:
    try:
        found = json.loads(plan_json.read_text(encoding="utf-8"))
        for key in path:
            found = found[key]
        return float(found)
    except (OSError, ValueError, TypeError, LookupError):
        return 0.0
