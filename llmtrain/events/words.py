"""The words that events use, so that a type checker finds a misspelt one.

In a file they are plain strings. A log of another version may hold words that are not listed here: they are
read as they are, so whoever tells words apart has an answer for all others.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Level = Literal["info", "warning", "error"]
"""How much a sentence should worry a person."""

# ---- of all writers
Source = Literal["rank", "agent", "supervisor"]
"""Who says something."""

# ---- of ranks
Phase = Literal["start", "build", "load", "step", "evaluate", "checkpoint", "finish"]
"""What a rank is about; limits of the watcher are per phase."""

ErrorClass = Literal[
    "out_of_memory",
    "communication",
    "storage",
    "checkpoint",
    "data",
    "numeric",
    "config",
    "user_code",
]
"""What a rank's exception means. `storage`: the file system refused, which may pass; `checkpoint`: what is
saved cannot be restored (none is whole, or it is of another model, seed or batch), which stays so."""

LeavesAs = Literal["completed", "stopped"]
"""Why ranks leave in agreement."""

IntervalSource = Literal["fixed", "default", "expected", "measured"]
"""Where the interval of checkpoints comes from: the recipe; nothing that is known; the expected failures, as
long as no save was measured; what saves cost and the failures."""

# ---- of bad numbers
Trouble = Literal["nonfinite", "overflow", "corruption", "spike"]
"""What is wrong with a step; `overflow`: of the scaled gradients in FP16."""

SkipReason = Literal[Trouble, "rewound"]
"""Why samples do not count."""

SpikeQuantity = Literal["loss", "grad_norm"]
SpikeAction = Literal["apply", "skip", "rewind"]
CorruptPart = Literal["weights", "master", "unknown"]
CorruptionAction = Literal["log", "recompute", "stop"]


# ---- of the supervisor
class NodeStatus(StrEnum):
    """What a node of the run is to it, from the most to the least useful."""

    HEALTHY = "healthy"
    SLOW = "slow"
    SPARE = "spare"
    QUARANTINED = "quarantined"
    """Left out for now."""
    LOST = "lost"
    """Not back after its quarantine."""


FindingKind = Literal[
    "rank_failed",
    "rank_dead",
    "launcher_failed",
    "agent_lost",
    "node_silent",
    "node_unreachable",
    "peer_unreachable",
    "start_timeout",
    "hang",
]
"""What a detector has found."""

GainCause = Literal["step_up", "replace_slow"]
"""Why an attempt that nothing was wrong with was left for a better one."""

EndCause = Literal[FindingKind, GainCause, "stop"]
"""Why an attempt ended before its last step; `stop`: it was told to, and could not save."""

AttemptOutcome = Literal["completed", "stopped", "failed"]
Action = Literal["finish", "stop", "give_up", "restart"]
"""What the policy chooses at an attempt's end."""
