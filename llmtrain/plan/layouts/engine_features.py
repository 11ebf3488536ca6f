"""What the training engine can run: the one place that the planner asks before it offers a layout for a
launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.config.layout import Layout, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFeatures:
    """Limits of an engine; `None` as a maximum means any degree."""

    schedules: tuple[Schedule, ...] = ("1f1b",)
    recompute: tuple[str, ...] = ("none",)
    zero: tuple[int, ...] = (1,)
    sequence_parallel: bool = False
    context_parallel: bool = False
    expert_parallel: bool = False
    uneven_layers: bool = False
    """Whether pipeline chunks may hold different numbers of layers."""

    def missing(self, layout: Layout) -> Iterator[str]:
        """Yield each setting of a layout that the engine cannot run, as `key=value`."""
        if layout.schedule not in self.schedules and layout.pp > 1:
            yield f"schedule={layout.schedule}"
        if layout.vpp > 1 and "interleaved" not in self.schedules:
            yield f"vpp={layout.vpp}"
        if layout.recompute not in self.recompute:
            yield f"recompute={layout.recompute}"
        if layout.zero not in self.zero:
            yield f"zero={layout.zero}"
        if layout.sequence_parallel and not self.sequence_parallel:
            yield "sequence_parallel=true"
        if layout.cp > 1 and not self.context_parallel:
            yield f"cp={layout.cp}"
        if layout.ep > 1 and not self.expert_parallel:
            yield f"ep={layout.ep}"


OWN_ENGINE = EngineFeatures(
    schedules=("1f1b", "interleaved", "zero-bubble"),
    recompute=("none", "selective", "full"),
    zero=(0, 1, 2, 3),
    sequence_parallel=True,
    uneven_layers=True,
)
"""What `llmtrain launch` can run today."""

ANY_ENGINE = EngineFeatures(
    schedules=("1f1b", "interleaved", "zero-bubble"),
    recompute=("none", "selective", "full"),
    zero=(0, 1, 2, 3),
    sequence_parallel=True,
    context_parallel=True,
    expert_parallel=True,
    uneven_layers=True,
)
"""Everything that the planner can calculate."""
