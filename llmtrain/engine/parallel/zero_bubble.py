"""The zero-bubble schedule ZB-H1 (Qi et al. 2024) for one chunk a stage and any number of micro-batches.

torch's `ScheduleInterleavedZeroBubble` has the same order, but counts in rounds that only matter with several
chunks, and refuses what does not fill them evenly: replicas whose micro-batches differ by one need both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

FORWARD, INPUT, WEIGHT = (
    _ComputationType.FORWARD,
    _ComputationType.BACKWARD_INPUT,
    _ComputationType.BACKWARD_WEIGHT,
)


class ZeroBubble(_PipelineScheduleRuntime):
    """One stage a rank; weight gradients are put off into what would be bubble."""

    def __init__(self, stage: Any, micro_batches: int, loss: Callable[..., Any]) -> None:
        super().__init__([stage], micro_batches, loss, scale_grads=False)
        stages = stage.group_size
        self.pipeline_order = {
            rank: [_Action(rank, *entry) for entry in zero_bubble_order(stages, rank, micro_batches)]
            for rank in range(stages)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


def zero_bubble_order(stages: int, stage: int, micro_batches: int) -> list[tuple[_ComputationType, int]]:
    """Passes of a stage in order: stages - 1 - stage forward passes, then one forward, one input-gradient
    and, `stage` micro-batches behind, one weight-gradient pass at a time."""
    ahead = min(stages - 1 - stage, micro_batches)
    order = [(FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches + stage):
        if ahead + index < micro_batches:
            order.append((FORWARD, ahead + index))
        if index < micro_batches:
            order.append((INPUT, index))
        if index >= stage:
            order.append((WEIGHT, index - stage))
    return order
