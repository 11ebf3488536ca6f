"""One layout, evaluated: memory of the fullest rank, the step as a sum, and what follows from both."""

from __future__ import annotations

from dataclasses import replace

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory.model import MemoryModel, StageMemory
from llmtrain.plan.plan import Breakdown, Candidate, MemoryBytes, Prediction
from llmtrain.plan.timing.layer_time import BlockTimer
from llmtrain.plan.timing.schedules import bubble_ratio
from llmtrain.plan.timing.step_time import step_time
from llmtrain.plan.timing.wire_bytes import wire_bytes
from llmtrain.plan.workload import Workload
from llmtrain.units import DAY

RESERVE = 0.04
"""Share of the capacity kept free: plans closer to the edge lose time to the allocator's retries."""


class Evaluator:
    """Evaluates layouts of one workload on one machine; kernels and blocks are remembered between layouts."""

    def __init__(self, work: Workload, machine: Machine, error: float = 0.0) -> None:
        """`error` is the half-width of the band around predicted steps, as a share."""
        self.error = error
        self.work = work
        self.machine = machine
        self.timer = BlockTimer(work, machine)
        self.memory_model = MemoryModel(work, machine)

    @property
    def usable_memory(self) -> float:
        """Bytes of a rank that a plan may fill."""
        return self.machine.capacity * (1.0 - RESERVE)

    def fullest(self, layout: Layout, micro_batches: int) -> StageMemory:
        """Memory of the fullest rank, in detail."""
        return self.memory_model.fullest(layout, micro_batches)

    def breakdown(self, layout: Layout, micro_batches: int) -> Breakdown:
        """The step as a sum."""
        return step_time(self.timer, layout, micro_batches)

    def seconds(self, layout: Layout, micro_batches: int) -> float:
        """Seconds of a step."""
        return step_time(self.timer, layout, micro_batches).total

    def candidate(self, layout: Layout) -> Candidate:
        """Evaluate a layout in full; raises ValueError when the batch cannot be split."""
        micro_batches = busiest(layout, self.work.global_batch)
        memory = self.fullest(layout, micro_batches).by_kind(self.machine.capacity)
        parts = self.breakdown(layout, micro_batches)
        return Candidate(
            layout=layout,
            global_batch=self.work.global_batch,
            accumulation=micro_batches,
            predicted=self._prediction(layout, micro_batches, memory, parts),
            parts=parts,
        )

    def with_wire_bytes(self, candidate: Candidate) -> Candidate:
        """The candidate with the bytes that its ranks send."""
        return replace(candidate, wire_bytes=wire_bytes(self.work, candidate.layout, self.machine))

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
            bubble_ratio=bubble_ratio(layout.schedule, layout.pp, layout.vpp, micro_batches),
            communication_ratio=(parts.exposed + parts.hidden) / seconds,
            exposed_communication_ratio=parts.exposed / seconds,
            memory=memory,
            train_days=days,
            gpu_hours=days * 24.0 * world,
            error=self.error,
        )


def busiest(layout: Layout, global_batch: int) -> int:
    """Micro-batches of the busiest replica; raises ValueError when the batch cannot be split."""
    return layout.micro_batches(global_batch)[0]
