"""One layout, evaluated: memory of the fullest rank, the step as a sum, and what follows from both."""

from __future__ import annotations

from llmtrain.config.layout import Layout
from llmtrain.plan.layer_time import BlockTimer
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory import fullest_stage
from llmtrain.plan.plan import Candidate, MemoryBytes, Prediction
from llmtrain.plan.step_time import Breakdown, pipeline_bubble_ratio, step_time
from llmtrain.plan.workload import Workload

DAY = 86400.0
RESERVE = 0.04
"""Share of the capacity kept free: plans closer to the edge lose time to the allocator's retries."""


class Evaluator:
    """Evaluates layouts of one workload on one machine; kernels and blocks are remembered between layouts."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self.work = work
        self.machine = machine
        self.timer = BlockTimer(work, machine)

    @property
    def usable_memory(self) -> float:
        """Bytes of a rank that a plan may fill."""
        return self.machine.capacity * (1.0 - RESERVE)

    def memory(self, layout: Layout, micro_batches: int) -> MemoryBytes:
        """Memory of the fullest rank."""
        found = fullest_stage(self.work, layout, self.machine, micro_batches)
        return found.by_kind(self.machine.capacity)

    def breakdown(self, layout: Layout, micro_batches: int) -> Breakdown:
        """The step as a sum."""
        return step_time(self.timer, layout, micro_batches)

    def candidate(self, layout: Layout) -> Candidate:
        """Evaluate a layout in full; raises ValueError when the batch cannot be split."""
        micro_batches = max(layout.micro_batches(self.work.global_batch))
        memory = self.memory(layout, micro_batches)
        parts = self.breakdown(layout, micro_batches)
        return Candidate(
            layout=layout,
            global_batch=self.work.global_batch,
            accumulation=micro_batches,
            predicted=self._prediction(layout, micro_batches, memory, parts),
            parts=parts,
        )

    def _prediction(
        self, layout: Layout, micro_batches: int, memory: MemoryBytes, parts: Breakdown
    ) -> Prediction:
        work, world, seconds = self.work, layout.world_size, parts.total
        flops = work.flops_per_token * work.tokens_per_step / (world * seconds)
        again = parts.recompute / max(parts.forward, 1e-30) / 3.0
        peak = self.timer.kernels.peak
        days = work.steps * seconds / DAY
        return Prediction(
            step_seconds=seconds,
            tokens_per_second_per_gpu=work.tokens_per_step / (world * seconds),
            model_flops_per_gpu=flops,
            mfu=flops / peak,
            hfu=flops / peak * (1.0 + again),
            bubble_ratio=pipeline_bubble_ratio(layout, micro_batches),
            communication_ratio=(parts.exposed + parts.hidden) / seconds,
            exposed_communication_ratio=parts.exposed / seconds,
            memory=memory,
            train_days=days,
            gpu_hours=days * 24.0 * world,
        )
