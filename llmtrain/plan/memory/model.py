"""Bytes of one rank by kind, for every pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory.activations import (
    activation_sizes,
    layer_activation_bytes,
    vocabulary_share,
    working_bytes,
)
from llmtrain.plan.memory.bookkeeping import BOOKKEEPING
from llmtrain.plan.memory.bounds import at_least, at_most
from llmtrain.plan.memory.engine_memory import EngineMemory, is_own_engine
from llmtrain.plan.memory.fragmentation import SLACK, around_the_loss
from llmtrain.plan.model_size import final_norm_parameters, position_parameters
from llmtrain.plan.plan import MemoryBytes
from llmtrain.plan.timing.collectives import shards
from llmtrain.plan.timing.schedules import micro_batches_in_flight, waiting_buffers
from llmtrain.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of one rank."""

    dense: float
    """Replicated over data-parallel ranks."""
    expert: float
    """Replicated over dp x cp / ep ranks only."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of a rank of one stage, finer than `MemoryBytes`."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    """Peak of what comes and goes: one layer's work, logits, gathered weights."""
    slack: float
    context: float

    @property
    def allocated(self) -> float:
        """What the framework's allocator counts: no context, no fragmentation."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working

    @property
    def reserved(self) -> float:
        """What the framework's allocator holds: with fragmentation."""
        return self.allocated + self.slack

    @property
    def total(self) -> float:
        """What the device must hold."""
        return self.reserved + self.context

    def by_kind(self, capacity: float) -> MemoryBytes:
        """The same in the kinds of a plan."""
        return MemoryBytes(
            parameters=self.parameters,
            gradients=self.gradients,
            optimizer=self.optimizer,
            activations=self.activations,
            workspace=self.working + self.slack + self.context,
            capacity=capacity,
        )


def stage_parameters(work: Workload, layout: Layout, stage: int) -> StageParameters:
    """Parameters of a rank of a stage; a tied head has its own copy on the last of several stages."""
    shape, tp, ep = work.shape, layout.tp, layout.ep
    layers = work.stage_layers(layout)[stage]
    dense = shape.attention_matrix / tp + shape.router + shape.sharded_vector / tp + shape.replicated_vector
    expert = shape.experts * shape.expert_matrix / tp
    if shape.experts == 1:
        dense, expert = dense + expert, 0.0
    dense, expert = layers * dense, layers * expert / ep
    vocabulary = vocabulary_share(work, layout) * shape.hidden
    if stage == 0:
        dense += vocabulary + position_parameters(work.model)
    if stage == layout.pp - 1:
        dense += final_norm_parameters(work.model)
        if layout.pp > 1 or not work.tied:
            dense += vocabulary
    return StageParameters(dense, expert)


# ---- a stage ------------------------------------------------------------------------------------
class MemoryModel:
    """Memory of one workload on one machine; what layouts have in common is remembered."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self._work = work
        self._machine = machine
        self._habits = BOOKKEEPING[machine.software.framework]
        self._element = work.activation_bytes
        fp32 = machine.software.gradients == "fp32" or self._element == 4
        self._gradient = 4.0 if fp32 else 2.0
        self._weights: dict[tuple[int, ...], StageParameters] = {}
        self._layers: dict[tuple[object, ...], float] = {}
        self._buffers: dict[tuple[object, ...], tuple[float, float]] = {}
        self._engine = EngineMemory(work, machine)
        self._of_engine: dict[tuple[object, ...], tuple[float, float]] = {}
        self._of_states: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def need(self, layout: Layout, micro_batches: int) -> float:
        """Bytes that the fullest rank needs."""
        stages = self._candidates(layout)
        most = max(sum(self._numbers(layout, stage, micro_batches)) for stage in stages)
        return most + self._machine.context

    def least(self, layout: Layout, micro_batches: int) -> float:
        """Bytes, quickly found, that the fullest rank needs at least."""
        if not is_own_engine(self._work, layout, self._machine):
            return self.need(layout, micro_batches)
        sizes, most = self._engine.sizes(layout), 0.0
        for stage in (0, layout.pp - 1) if sizes.puts_off else (0,):
            beside = at_least(self._work, layout, sizes, micro_batches, stage)
            most = max(most, sum(self._states(layout, stage)) + (1.0 + SLACK) * beside)
        return self._machine.context + most

    def most(self, layout: Layout, micro_batches: int) -> float:
        """Bytes, quickly found, that no rank needs more than; infinite where only the exact sum tells."""
        if not is_own_engine(self._work, layout, self._machine):
            return inf
        sizes = self._engine.sizes(layout)
        beside = at_most(self._work, layout, sizes, micro_batches, self._engine.bucket)
        if sizes.puts_off and layout.zero >= 2:
            beside += 8.0 * max(
                self._stage_weights(layout, stage).total for stage in self._candidates(layout)
            )
        states = max(sum(self._states(layout, stage)) for stage in self._candidates(layout))
        return states + (1.0 + SLACK) * beside + self._machine.context

    def fullest(self, layout: Layout, micro_batches: int) -> StageMemory:
        """The stage whose ranks need most."""
        stages = (self.stage(layout, stage, micro_batches) for stage in self._candidates(layout))
        return max(stages, key=lambda entry: entry.total)

    def stage(self, layout: Layout, stage: int, micro_batches: int) -> StageMemory:
        """A rank of one stage that runs `micro_batches` a step."""
        parameters, gradients, optimizer, *others = self._numbers(layout, stage, micro_batches)
        activations, working, slack = others
        return StageMemory(
            stage=stage,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            working=working,
            slack=slack,
            context=self._machine.context,
        )

    def _candidates(self, layout: Layout) -> tuple[int, ...]:
        """Stages that can be the fullest: the ends, and of those between the first and the last with as many
        layers."""
        last = layout.pp - 1
        if last <= 1:
            return (0, last) if last else (0,)
        layers = self._work.stage_layers(layout)
        if layers[0] == layers[last] == layers[1]:
            return (0, last)
        middle = range(1, last)
        first = {layers[stage]: stage for stage in reversed(middle)}
        return tuple(sorted({0, last, *first.values(), *{layers[stage]: stage for stage in middle}.values()}))

    def _numbers(
        self, layout: Layout, stage: int, micro_batches: int
    ) -> tuple[float, float, float, float, float, float]:
        """Bytes of parameters, gradients, optimizer, activations, working buffers and slack."""
        return *self._states(layout, stage), *self._activations(layout, stage, micro_batches)

    def _states(self, layout: Layout, stage: int) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer."""
        degrees = (layout.tp, layout.pp, layout.vpp, layout.dp, layout.cp, layout.ep)
        key = (*degrees, layout.zero, layout.sequence_parallel, layout.recompute == "full", stage)
        found = self._of_states.get(key)
        if found is None:
            found = self._of_states[key] = self._count_states(layout, stage)
        return found

    def _count_states(self, layout: Layout, stage: int) -> tuple[float, float, float]:
        weights = self._stage_weights(layout, stage)
        zero, element, gradient = layout.zero, self._element, self._gradient
        replicas = shards(self._machine, layout.dp * layout.cp, layout.tp)
        whole = weights.total
        shard = weights.dense / replicas + weights.expert / max(1.0, replicas / layout.ep)
        kept = self._kept_whole(layout, stage)
        waits = self._habits.waits_in_pipelines and layout.pp > 1
        gradients = gradient * (shard if zero >= 2 and not waits else whole) + gradient * kept
        if self._work.communication == "int8" and layout.dp > 1:
            gradients += 4.0 * whole  # what rounding leaves out
        if self._habits.half_gradients and gradient == 4.0 and element == 2:
            gradients += 2.0 * whole
        if self._habits.unscaled_shard and gradient == 2.0 and zero in (1, 2):
            gradients += 4.0 * shard
        if self._habits.reduced_shard and zero == 1 and layout.dp > 1:
            gradients += gradient * shard
        parameter = element
        if self._habits.fp32_parameters and zero >= 3:
            parameter = 4
        gathered = element * whole if zero >= 3 and waits else 0.0
        return (
            parameter * (shard + kept * (1.0 - 1.0 / layout.dp) if zero >= 3 else whole) + gathered,
            gradients,
            (8.0 if parameter == 4 else 12.0) * (shard if zero >= 1 else whole),
        )

    def _activations(self, layout: Layout, stage: int, micro_batches: int) -> tuple[float, float, float]:
        """Bytes of activations, of what comes and goes beside them, and of what fragmentation takes."""
        if is_own_engine(self._work, layout, self._machine):
            kept, working = self._of_own_engine(layout, stage, micro_batches)
            return kept, working, SLACK * (kept + working)
        alive = micro_batches_in_flight(layout.schedule, layout.pp, layout.vpp, micro_batches, stage)
        layers = self._work.stage_layers(layout)[stage]
        kept = self._layer(layout) * layers * alive + self._between_stages(layout, stage, alive)
        working, loss = self._working(layout, stage, alive)
        return kept, working, SLACK * (kept + working) + loss

    def _of_own_engine(self, layout: Layout, stage: int, micro_batches: int) -> tuple[float, float]:
        most = min(micro_batches, 2 * layout.pp) if layout.vpp == 1 else micro_batches
        shape = (layout.tp, layout.pp, layout.vpp, layout.zero, layout.micro_batch, most, stage)
        replicas = layout.dp if layout.zero >= 2 else 0
        key = (*shape, replicas, layout.sequence_parallel, layout.recompute, layout.schedule)
        found = self._of_engine.get(key)
        if found is None:
            found = self._of_engine[key] = self._engine.stage(layout, stage, micro_batches)
        return found

    def _kept_whole(self, layout: Layout, stage: int) -> float:
        """Parameters whose gradients this engine keeps whole on every replica whatever the ZeRO stage: those
        that are also summed over the tensor-parallel ranks, and under ZeRO-3 all norms and biases."""
        if layout.zero < 2 or layout.dp == 1 or not self._habits.whole_vectors:
            return 0.0
        work, last = self._work, stage == layout.pp - 1
        layers = work.stage_layers(layout)[stage]
        norms = layers * work.shape.replicated_vector + (final_norm_parameters(work.model) if last else 0)
        if layout.sequence_parallel and stage == 0:
            norms += position_parameters(work.model)
        biases = layers * work.shape.sharded_vector / layout.tp
        if layout.zero == 3:
            return norms + biases
        return norms if layout.sequence_parallel else 0.0

    def _between_stages(self, layout: Layout, stage: int, alive: float) -> float:
        """What was received and waits for its pass (a pass under way has it as an input of its layers), and
        what was sent and is still held."""
        element, _, hidden, shard = activation_sizes(self._work, layout)
        buffers = 0.0
        if self._habits.receive_buffers:
            buffers += waiting_buffers(layout.schedule, layout.pp, layout.vpp, stage)
        if self._habits.kept_outputs and stage < layout.pp - 1:
            buffers += alive * shard / layout.tp
        return buffers * element * hidden / shard

    def _stage_weights(self, layout: Layout, stage: int) -> StageParameters:
        # Recomputation weighs the head against layers, so it moves the split (`Workload.stage_layers`).
        key = (layout.tp, layout.ep, layout.pp, layout.vpp, layout.recompute == "full", stage)
        found = self._weights.get(key)
        if found is None:
            found = self._weights[key] = stage_parameters(self._work, layout, stage)
        return found

    def _layer(self, layout: Layout) -> float:
        key = (layout.tp, layout.cp, layout.micro_batch, layout.sequence_parallel, layout.recompute)
        found = self._layers.get(key)
        if found is None:
            found = layer_activation_bytes(self._work, layout, self._machine, layout.recompute)
            self._layers[key] = found
        return found

    def _working(self, layout: Layout, stage: int, alive: float) -> tuple[float, float]:
        """Working buffers, and what the loss changes of the slack."""
        ends = (stage == 0, stage == layout.pp - 1, alive if self._machine.software.dropout else 0.0)
        shape = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.dp > 1)
        key = (*ends, *shape, layout.sequence_parallel, layout.recompute, layout.zero)
        found = self._buffers.get(key)
        if found is None:
            about = (self._work, layout, self._machine, stage)
            found = self._buffers[key] = (working_bytes(*about, alive), around_the_loss(*about))
        return found
