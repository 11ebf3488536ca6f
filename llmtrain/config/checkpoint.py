"""When checkpoints are written, how many are kept, and the tier in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmtrain.config.fields import Duration, NaturalInt, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTierConfig:
    """Snapshots in the nodes' shared memory, which outlive the ranks."""

    every_steps: PositiveInt | None = None
    """Steps between two snapshots; default: none, the tier is off."""
    copies: Literal[0, 1, 2] = 1
    """Copies of every rank's state on other nodes: as many nodes may be lost at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every_steps: PositiveInt | None = None
    """Steps between two full checkpoints; default: none by step."""
    every: Duration | Literal["auto"] = "auto"
    """Seconds between two checkpoints (duration, e.g. `30m`); 0 switches the timer off. `auto`: 30 minutes,
    and when `every_steps` is not given, from the first save on what costs least by its measured cost and the
    failure rate (Young 1974, Daly 2006), between a minute and four hours."""
    incremental: NaturalInt = 3
    """Checkpoints by the timer that may follow a full one as changed bytes only; 0: all are full."""
    keep: PositiveInt = 3
    """Newest full checkpoints kept; at least 1. Incremental ones go when a full one follows them."""
    keep_every_steps: PositiveInt | None = None
    """Besides these, checkpoints whose step is a multiple of it are kept for ever; default: none."""
    memory: MemoryTierConfig = field(default_factory=MemoryTierConfig)
    """Snapshots in host memory."""
