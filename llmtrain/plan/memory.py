"""Bytes of one rank by kind, for every pipeline stage.

Activations per layer and micro-batch follow Korthikanti et al. 2022, section 4: with half precision, dropout, f = 4h and no
recomputation s b h (10 + 24/t + 5 a s/(h t)); here each tensor is counted by itself, so that grouped queries, gated
feed-forward blocks, experts and engines without dropout come out of the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.model_size import final_norm_parameters, position_parameters
from llmtrain.plan.plan import MemoryBytes
from llmtrain.plan.schedules import micro_batches_in_flight, split_layers
from llmtrain.plan.workload import Workload

SLACK = 0.04
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


def stage_layers(work: Workload, layout: Layout, stage: int) -> int:
    """Layers that a stage holds over all its chunks."""
    chunks = split_layers(work.model.layers, layout.pp * layout.vpp)
    return sum(chunks[stage :: layout.pp])


def stage_parameters(work: Workload, layout: Layout, stage: int) -> StageParameters:
    """Parameters of a rank of a stage; a tied head has its own copy on the last of several stages."""
    shape, tp, ep = work.shape, layout.tp, layout.ep
    vector = (shape.sharded_vector + 0.0) / tp + shape.replicated_vector
    layers = stage_layers(work, layout, stage)
    experts = shape.experts * shape.expert_matrix
    dense = layers * (shape.attention_matrix / tp + shape.router + vector)
    expert = layers * experts / tp
    if shape.experts == 1:
        dense, expert = dense + expert, 0.0
    vocabulary = work.model.vocab * shape.hidden / tp
    if stage == 0:
        dense += vocabulary + position_parameters(work.model)
    if stage == layout.pp - 1:
        dense += final_norm_parameters(work.model)
        if layout.pp > 1 or not work.tied:
            dense += vocabulary
    return StageParameters(dense, expert / ep)


def layer_activation_bytes(work: Workload, layout: Layout, machine: Machine, recompute: str) -> float:
    """Bytes that one layer keeps for the backward pass of one micro-batch."""
    shape, software, tp = work.shape, machine.software, layout.tp
    element = work.activation_bytes
    tokens = layout.micro_batch * work.sequence / layout.cp
    hidden = tokens * shape.hidden
    replicated = tp if layout.sequence_parallel else 1
    if recompute == "full":
        return element * hidden / replicated
    masks = 2 * hidden if software.dropout else 0.0
    residual = 4 * element * hidden + masks
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = element * tokens * (width + shape.heads * shape.head_dim) / tp
    kept = (3 if shape.gated else 2) * shape.ffn_hidden * element
    routed = shape.experts_per_token if shape.experts > 1 else 1
    feed_forward = routed * tokens * kept / tp
    if routed > 1:
        feed_forward += 2 * element * routed * hidden / replicated
    core = 4.0 * tokens * shape.heads / tp if software.attention != "unfused" else 0.0
    if software.attention == "unfused" and recompute == "none":
        core = score_bytes(work, layout, machine)
    return residual / replicated + attention + feed_forward + core


def score_bytes(work: Workload, layout: Layout, machine: Machine) -> float:
    """Bytes of the unfused attention core of one layer: softmax output, and with dropout its mask and its output."""
    element = work.activation_bytes
    per_score = 2 * element + 1 if machine.software.dropout else 2 * element
    scores = layout.micro_batch * work.sequence**2 * work.shape.heads / layout.tp / layout.cp
    return per_score * scores


def stage_memory(
    work: Workload, layout: Layout, machine: Machine, stage: int, micro_batches: int
) -> MemoryBytes:
    """Bytes by kind of a rank of a stage that runs `micro_batches` a step."""
    weights = stage_parameters(work, layout, stage)
    element = work.activation_bytes
    dense_ranks = layout.dp * layout.cp
    expert_ranks = max(1.0, dense_ranks / layout.ep)

    def states(per_weight: float, sharded: bool) -> float:
        if not sharded:
            return per_weight * weights.total
        return per_weight * (weights.dense / dense_ranks + weights.expert / expert_ranks)

    gradient = 4.0 if machine.software.gradients == "fp32" or work.mode in ("fp32", "tf32") else 2.0
    masters = 8.0 if element == 4 else 12.0
    alive = micro_batches_in_flight(layout.schedule, layout.pp, layout.vpp, micro_batches, stage)
    layers = stage_layers(work, layout, stage)
    per_layer = layer_activation_bytes(work, layout, machine, layout.recompute)
    activations = per_layer * layers * alive
    buffers = _working_set(work, layout, machine) + _end_buffers(work, layout, stage, alive)
    return MemoryBytes(
        parameters=states(float(element), layout.zero >= 3),
        gradients=states(gradient, layout.zero >= 2),
        optimizer=states(masters, layout.zero >= 1),
        activations=activations,
        workspace=machine.context + buffers + SLACK * (activations + buffers),
        capacity=machine.capacity,
    )


def _working_set(work: Workload, layout: Layout, machine: Machine) -> float:
    """What one layer needs beside the activations kept, while it is recomputed or differentiated."""
    if layout.recompute == "full":
        return layer_activation_bytes(work, layout, machine, "none")
    if layout.recompute == "selective" and machine.software.attention == "unfused":
        return score_bytes(work, layout, machine)
    return 0.0


def _end_buffers(work: Workload, layout: Layout, stage: int, alive: float) -> float:
    """Embedding output on the first stage; norm input, half-precision logits and FP32 softmax on the last."""
    element = work.activation_bytes
    tokens = layout.micro_batch * work.sequence / layout.cp
    hidden = tokens * work.shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    total = 0.0
    if stage == 0:
        total += element * hidden * alive
    if stage == layout.pp - 1:
        total += 2 * element * hidden + (element + 4) * tokens * work.model.vocab / layout.tp
    return total


def fullest_stage(
    work: Workload, layout: Layout, machine: Machine, micro_batches: int
) -> tuple[int, MemoryBytes]:
    """Return the stage whose ranks need most, and what they need."""
    stages = range(layout.pp) if layout.pp <= 4 else (0, 1, layout.pp - 2, layout.pp - 1)
    found = ((stage, stage_memory(work, layout, machine, stage, micro_batches)) for stage in stages)
    return max(found, key=lambda entry: entry[1].total)
