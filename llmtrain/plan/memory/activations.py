"""Bytes of activations, and of what comes and goes while a layer runs.

Activations per layer and micro-batch follow Korthikanti et al. 2022, section 4: with half precision, dropout,
f = 4h and no recomputation s b h (10 + 24/t + 5 a s/(h t)); here each tensor is counted by itself, so that
grouped queries, gated feed-forward blocks, experts and engines without dropout come out of the same sum.
"""

from __future__ import annotations

from math import ceil

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory.bookkeeping import BOOKKEEPING, Bookkeeping
from llmtrain.plan.memory.bucket_packing import BUCKETS_AT_ONCE, default_bucket_bytes
from llmtrain.plan.workload import Workload


def vocabulary_share(work: Workload, layout: Layout) -> int:
    """Vocabulary rows of a tensor-parallel rank; the last one may have fewer."""
    return ceil(work.model.vocab / layout.tp)


def layer_activation_bytes(work: Workload, layout: Layout, machine: Machine, recompute: str) -> float:
    """Bytes that one layer keeps for the backward pass of one micro-batch."""
    software = machine.software
    element, tokens, hidden, shard = activation_sizes(work, layout)
    if recompute == "full":
        return element * hidden / shard
    if recompute == "selective" and software.selective_recompute == "alternate-layers":
        whole = layer_activation_bytes(work, layout, machine, "none")
        return 0.5 * (whole + element * hidden / shard)
    shape = work.shape
    if recompute == "selective" and software.selective_recompute == "operators":
        kept = (2 * shape.heads + shape.kv_heads) * shape.head_dim + shape.ffn_hidden
        # Eagerly, what no gradient needs is kept too: the last product's result, and where the sequence is
        # shared out, its scattered sum beside the attention's.
        last = 0.0 if software.fused_kernels else hidden
        sums = (1 if software.fused_kernels else 2) * (shard > 1)
        return element * ((1 + sums) * hidden / shard + last + tokens * kept / layout.tp)
    lean = recompute == "selective" and BOOKKEEPING[software.framework].lean_selective
    norms = (2 if lean else 4) * element * hidden / shard
    if shard > 1 and BOOKKEEPING[software.framework].whole_inputs:
        norms = element * (2 * hidden / shard + 2 * hidden)
    masks = 2 * hidden / shard if software.dropout else 0.0
    return (
        norms
        + masks
        + _attention_bytes(work, layout, machine, recompute)
        + _feed_forward(work, layout, machine, lean=lean)
    )


def activation_sizes(work: Workload, layout: Layout) -> tuple[int, float, float, int]:
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
    element, tokens, _, _ = activation_sizes(work, layout)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = query + 2 * key + query
    core = recompute == "none"
    if core and habits.rotated_copies and (work.model.rope is not None or work.model.qk_norm):
        kept += query + key
    total = element * tokens * kept / layout.tp
    if software.attention == "unfused":
        return total + (score_bytes(work, layout, machine) if core else 0.0)
    rows = core or (recompute == "selective" and habits.lean_selective)
    return total + (4.0 * tokens * shape.heads / layout.tp if rows else 0.0)


def _feed_forward(work: Workload, layout: Layout, machine: Machine, *, lean: bool) -> float:
    """What the feed-forward block keeps; its up projections only where it is `lean`."""
    shape, habits = work.shape, BOOKKEEPING[machine.software.framework]
    element, tokens, hidden, shard = activation_sizes(work, layout)
    tensors = habits.gated_tensors if shape.gated else 2
    width = (tensors // 2 if lean else tensors) * shape.ffn_hidden / layout.tp
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


def working_bytes(work: Workload, layout: Layout, machine: Machine, stage: int, alive: float) -> float:
    """What comes and goes beside the activations kept: logits, one layer's work, gathered weights,
    gradients on their way. This engine's logits are gone before a layer's backward pass begins."""
    habits = BOOKKEEPING[machine.software.framework]
    fixed = _scratch(work, layout, machine, stage)
    ends, layer = _end_bytes(work, layout, machine, stage, alive), _layer_bytes(work, layout, machine, stage)
    apart = habits.loss_apart or (habits.backward_buffers and layout.zero >= 2)
    return fixed + (max(ends, layer) if apart else ends + layer)


def loss_is_the_peak(work: Workload, layout: Layout, machine: Machine, stage: int) -> bool:
    """Whether the loss, and not a layer's backward pass, is the fullest moment of the last stage."""
    ends = _end_bytes(work, layout, machine, stage, 0.0)
    return ends >= _layer_bytes(work, layout, machine, stage)


def _layer_weights(work: Workload, layout: Layout) -> float:
    """Matrix weights of one layer of a rank."""
    shape = work.shape
    return (shape.attention_matrix + shape.experts * shape.expert_matrix / layout.ep) / layout.tp


def _scratch(work: Workload, layout: Layout, machine: Machine, stage: int) -> float:
    """Fixed buffers, and ZeRO-3's gathered weights."""
    habits, layer = BOOKKEEPING[machine.software.framework], _layer_weights(work, layout)
    gradient = 4.0 if machine.software.gradients == "fp32" else 2.0
    total = habits.bucket_elements * (gradient + 2.0) if layout.dp > 1 else 0.0
    if habits.layer_scratch and machine.software.fused_kernels:
        total += 2.0 * layer
    if layout.zero >= 3:
        total += work.activation_bytes * _gathered_weights(work, layout, habits, stage, layer)
    return total


def _gathered_weights(work: Workload, layout: Layout, habits: Bookkeeping, stage: int, layer: float) -> float:
    """Weights that are whole at one time: two layers', or the head's beside one."""
    vocabulary = vocabulary_share(work, layout) * work.shape.hidden
    if not habits.ends_stay_gathered:
        return layer + max(layer, vocabulary if stage == layout.pp - 1 else 0)
    ends = (stage == 0) + (stage == layout.pp - 1 and (layout.pp > 1 or not work.tied))
    whole = ends * vocabulary
    if habits.waits_in_pipelines and layout.pp > 1:  # all of them are, beside the buffer of a gather
        return max(whole, layer)
    return whole + 2 * layer + (max(whole, layer) if habits.prefetches else 0)


def _layer_bytes(work: Workload, layout: Layout, machine: Machine, stage: int) -> float:
    """What one layer's backward pass needs, its recomputation included."""
    shape, habits = work.shape, BOOKKEEPING[machine.software.framework]
    total = 0.0
    # Without sharded gradients, the logits on the last stage are more.
    if habits.backward_buffers and (stage < layout.pp - 1 or layout.zero >= 2):
        element, tokens, hidden, _ = activation_sizes(work, layout)
        wide = (2 if shape.gated else 1) * shape.ffn_hidden / layout.tp
        total += element * 2 * (hidden + tokens * wide)
    if layout.zero >= 2 and layout.dp > 1:
        gradient = 4.0 if machine.software.gradients == "fp32" else 2.0
        own = habits.whole_vectors
        layer = _layer_weights(work, layout)
        total += _whole_gradients(work, layout, machine, stage) if own else layer * gradient
    if layout.recompute == "full":
        total += layer_activation_bytes(work, layout, machine, "none")
    if layout.recompute == "selective" and machine.software.selective_recompute != "attention":
        whole = layer_activation_bytes(work, layout, machine, "none")
        total += max(0.0, whole - layer_activation_bytes(work, layout, machine, "selective"))
    elif layout.recompute == "selective" and machine.software.attention == "unfused":
        total += score_bytes(work, layout, machine)
    return total


def _whole_gradients(work: Workload, layout: Layout, machine: Machine, stage: int) -> float:
    """FP32 gradients of the buckets that are being filled or reduced, where ZeRO keeps shards of them."""
    shape = work.shape
    bucket = work.bucket or default_bucket_bytes(on_cpu=machine.is_cpu)
    block = 4.0 * shape.parameters / layout.tp
    if layout.zero == 3:
        bucket = min(bucket, block)
    ends = (stage == 0) + (stage == layout.pp - 1 and (layout.pp > 1 or not work.tied))
    vocabulary = 4.0 * vocabulary_share(work, layout) * shape.hidden
    layers = work.stage_layers(layout)[stage]
    # The embedding's come last, when no activations are left.
    largest = max(bucket, vocabulary if stage == layout.pp - 1 else 0.0)
    return min(largest + (BUCKETS_AT_ONCE - 1) * bucket, layers * block + ends * vocabulary)


def _end_bytes(work: Workload, layout: Layout, machine: Machine, stage: int, alive: float) -> float:
    """Embedding output on the first stage; norm input and output, and logits on the last."""
    element, _, hidden, shard = activation_sizes(work, layout)
    total = 0.0
    if stage == 0 and machine.software.dropout:
        total += hidden / shard * alive
    if stage == layout.pp - 1:
        total += 2 * element * hidden / shard + logit_bytes(work, layout, machine)
        if shard > 1 and BOOKKEEPING[machine.software.framework].whole_inputs:
            total += element * hidden
    return total


def logit_bytes(work: Workload, layout: Layout, machine: Machine) -> float:
    """Bytes at the peak of the loss; a fused loss holds the logits and their gradient."""
    habits = BOOKKEEPING[machine.software.framework]
    element, tokens, _, _ = activation_sizes(work, layout)
    each = habits.logit_bytes
    if machine.software.fused_loss:
        each = 2 * element
    elif layout.tp > 1 and habits.split_logit_bytes is not None:
        each = habits.split_logit_bytes
    return each * tokens * vocabulary_share(work, layout)
