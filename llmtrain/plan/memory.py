"""Bytes of one rank by kind, for every pipeline stage.

Activations per layer and micro-batch follow Korthikanti et al. 2022, section 4: with half precision, dropout,
f = 4h and no recomputation s b h (10 + 24/t + 5 a s/(h t)); here each tensor is counted by itself, so that
grouped queries, gated feed-forward blocks, experts and engines without dropout come out of the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from llmtrain.config.layout import Layout
from llmtrain.plan.bookkeeping import BOOKKEEPING
from llmtrain.plan.machine import Machine
from llmtrain.plan.model_size import final_norm_parameters, position_parameters
from llmtrain.plan.plan import MemoryBytes
from llmtrain.plan.schedules import micro_batches_in_flight, stage_layer_counts, waiting_buffers
from llmtrain.plan.workload import Workload

SLACK = 0.08
"""Share of activations and working buffers lost to the allocator's fragmentation."""


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
    def total(self) -> float:
        """What the device must hold."""
        return self.allocated + self.slack + self.context

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


def vocabulary_share(work: Workload, layout: Layout) -> int:
    """Vocabulary rows of a tensor-parallel rank; the last one may have fewer."""
    return ceil(work.model.vocab / layout.tp)


def stage_parameters(work: Workload, layout: Layout, stage: int) -> StageParameters:
    """Parameters of a rank of a stage; a tied head has its own copy on the last of several stages."""
    shape, tp, ep = work.shape, layout.tp, layout.ep
    layers = stage_layer_counts(work.model.layers, layout.pp, layout.vpp)[stage]
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


# ---- activations --------------------------------------------------------------------------------
def layer_activation_bytes(work: Workload, layout: Layout, machine: Machine, recompute: str) -> float:
    """Bytes that one layer keeps for the backward pass of one micro-batch."""
    software = machine.software
    element, tokens, hidden, shard = _sizes(work, layout)
    if recompute == "full":
        return element * hidden / shard
    if recompute == "selective" and software.selective_recompute == "alternate-layers":
        whole = layer_activation_bytes(work, layout, machine, "none")
        return 0.5 * (whole + element * hidden / shard)
    shape = work.shape
    if recompute == "selective" and software.selective_recompute == "operators":
        kept = (2 * shape.heads + shape.kv_heads) * shape.head_dim + shape.ffn_hidden
        return element * (2 * hidden / shard + tokens * kept / layout.tp)
    norms = 4 * element * hidden / shard
    masks = 2 * hidden / shard if software.dropout else 0.0
    return (
        norms
        + masks
        + _attention_bytes(work, layout, machine, recompute)
        + _feed_forward(work, layout, machine)
    )


def _sizes(work: Workload, layout: Layout) -> tuple[int, float, float, int]:
    """Bytes an element, tokens of a rank, elements of its hidden state, ranks that share the residual
    stream.
    """
    tokens = layout.micro_batch * work.sequence / layout.cp
    shard = layout.tp if layout.sequence_parallel else 1
    return work.activation_bytes, tokens, tokens * work.shape.hidden, shard


def _attention_bytes(work: Workload, layout: Layout, machine: Machine, recompute: str) -> float:
    """Projections, the attention output and what the attention core keeps."""
    shape, software = work.shape, machine.software
    habits = BOOKKEEPING[software.framework]
    element, tokens, _, _ = _sizes(work, layout)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = query + 2 * key + query
    core = recompute == "none"
    if core and habits.rotated_copies and (work.model.rope is not None or work.model.qk_norm):
        kept += query + key
    total = element * tokens * kept / layout.tp
    if software.attention == "unfused":
        return total + (score_bytes(work, layout, machine) if core else 0.0)
    return total + (4.0 * tokens * shape.heads / layout.tp if core else 0.0)


def _feed_forward(work: Workload, layout: Layout, machine: Machine) -> float:
    shape, habits = work.shape, BOOKKEEPING[machine.software.framework]
    element, tokens, hidden, shard = _sizes(work, layout)
    width = (habits.gated_tensors if shape.gated else 2) * shape.ffn_hidden / layout.tp
    if shape.experts == 1:
        return element * tokens * width
    routed = shape.experts_per_token
    return element * routed * (tokens * width + 2 * hidden / shard)


def score_bytes(work: Workload, layout: Layout, machine: Machine) -> float:
    """Bytes of the unfused attention core of one layer: softmax, and with dropout its mask and its output."""
    element = work.activation_bytes
    per_score = 2 * element + 1 if machine.software.dropout else 2 * element
    scores = layout.micro_batch * work.sequence**2 * work.shape.heads / layout.tp / layout.cp
    return per_score * scores


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
        self._buffers: dict[tuple[object, ...], float] = {}

    def need(self, layout: Layout, micro_batches: int) -> float:
        """Bytes that the fullest rank needs."""
        most = 0.0
        for stage in self._candidates(layout):
            states, gradients, optimizer, activations, working = self._numbers(layout, stage, micro_batches)
            need = states + gradients + optimizer + (1.0 + SLACK) * (activations + working)
            most = max(most, need)
        return most + self._machine.context

    def fullest(self, layout: Layout, micro_batches: int) -> StageMemory:
        """The stage whose ranks need most."""
        stages = (self.stage(layout, stage, micro_batches) for stage in self._candidates(layout))
        return max(stages, key=lambda entry: entry.total)

    def stage(self, layout: Layout, stage: int, micro_batches: int) -> StageMemory:
        """A rank of one stage that runs `micro_batches` a step."""
        parameters, gradients, optimizer, activations, working = self._numbers(layout, stage, micro_batches)
        return StageMemory(
            stage=stage,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            working=working,
            slack=SLACK * (activations + working),
            context=self._machine.context,
        )

    def _candidates(self, layout: Layout) -> tuple[int, ...]:
        """Stages that can be the fullest: the ends, and their neighbours where the ends hold fewer layers."""
        last = layout.pp - 1
        if last <= 1:
            return (0, last) if last else (0,)
        if self._work.model.layers % (layout.pp * layout.vpp):
            return (0, 1, last - 1, last) if last > 2 else (0, 1, 2)
        return (0, last)

    def _numbers(
        self, layout: Layout, stage: int, micro_batches: int
    ) -> tuple[float, float, float, float, float]:
        """Bytes of parameters, gradients, optimizer, activations and working buffers."""
        weights = self._stage_weights(layout, stage)
        replicas, zero, element, gradient = layout.dp * layout.cp, layout.zero, self._element, self._gradient
        whole = weights.total
        shard = weights.dense / replicas + weights.expert / max(1.0, replicas / layout.ep)
        gradients = gradient * (shard if zero >= 2 else whole)
        if self._habits.half_gradients and gradient == 4.0 and element == 2:
            gradients += 2.0 * whole
        if self._habits.reduced_shard and zero == 1 and layout.dp > 1:
            gradients += gradient * shard
        alive = micro_batches_in_flight(layout.schedule, layout.pp, layout.vpp, micro_batches, stage)
        layers = stage_layer_counts(self._work.model.layers, layout.pp, layout.vpp)[stage]
        return (
            element * (shard if zero >= 3 else whole),
            gradients,
            (8.0 if element == 4 else 12.0) * (shard if zero >= 1 else whole),
            self._layer(layout) * layers * alive + self._received(layout, stage),
            self._working(layout, stage, alive),
        )

    def _received(self, layout: Layout, stage: int) -> float:
        """What was received and waits for its pass; a pass under way has it as an input of its layers."""
        if not self._habits.receive_buffers:
            return 0.0
        element, _, hidden, shard = _sizes(self._work, layout)
        buffers = waiting_buffers(layout.schedule, layout.pp, layout.vpp, stage)
        return buffers * element * hidden / shard

    def _stage_weights(self, layout: Layout, stage: int) -> StageParameters:
        key = (layout.tp, layout.ep, layout.pp, layout.vpp, stage)
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

    def _working(self, layout: Layout, stage: int, alive: float) -> float:
        ends = (stage == 0, stage == layout.pp - 1, alive if self._machine.software.dropout else 0.0)
        shape = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.dp > 1)
        key = (*ends, *shape, layout.sequence_parallel, layout.recompute, layout.zero)
        found = self._buffers.get(key)
        if found is None:
            found = _working(self._work, layout, self._machine, stage)
            found += _ends(self._work, layout, self._machine, stage, alive)
            self._buffers[key] = found
        return found


def _working(work: Workload, layout: Layout, machine: Machine, stage: int) -> float:
    """What one layer needs beside the activations kept, while it is recomputed or gathered."""
    shape, habits = work.shape, BOOKKEEPING[machine.software.framework]
    layer = (shape.attention_matrix + shape.experts * shape.expert_matrix / layout.ep) / layout.tp
    total = habits.buckets if layout.dp > 1 else 0.0
    if habits.layer_scratch and machine.software.fused_kernels:
        total += 2.0 * layer
    if habits.backward_buffers and stage < layout.pp - 1:  # on the last stage the logits are more
        element, tokens, hidden, _ = _sizes(work, layout)
        wide = (2 if shape.gated else 1) * shape.ffn_hidden / layout.tp
        total += element * 2 * (hidden + tokens * wide)
    if layout.zero >= 2:
        gradient = 4.0 if machine.software.gradients == "fp32" else 2.0
        total += layer * gradient
    if layout.zero >= 3:
        vocabulary = vocabulary_share(work, layout) * shape.hidden if stage == layout.pp - 1 else 0
        total += (2 * layer + vocabulary) * work.activation_bytes
    if layout.recompute == "full":
        total += layer_activation_bytes(work, layout, machine, "none")
    if layout.recompute == "selective" and machine.software.attention == "unfused":
        total += score_bytes(work, layout, machine)
    return total


def _ends(work: Workload, layout: Layout, machine: Machine, stage: int, alive: float) -> float:
    """Embedding output on the first stage; norm input and output, and logits on the last."""
    element, tokens, hidden, shard = _sizes(work, layout)
    total = 0.0
    if stage == 0 and machine.software.dropout:
        total += hidden / shard * alive
    if stage == layout.pp - 1:
        logit = BOOKKEEPING[machine.software.framework].logit_bytes
        total += 2 * element * hidden / shard + logit * tokens * vocabulary_share(work, layout)
    return total
