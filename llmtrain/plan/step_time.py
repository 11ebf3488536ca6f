"""The time of one optimizer step, as a sum of named parts.

Pipeline: the fullest stage works through its m micro-batches; filling and draining adds the other stages' share. Data
parallel: gradients are reduced (and ZeRO weights gathered) behind the backward pass only where the software does so.
"""

from __future__ import annotations

from llmtrain.config.layout import Layout
from llmtrain.plan.collectives import Group, all_reduce, group, scatter_or_gather, send
from llmtrain.plan.layer_time import BlockTimer, data_group
from llmtrain.plan.memory import stage_layers, stage_parameters
from llmtrain.plan.plan import Breakdown
from llmtrain.plan.schedules import bubble_ratio

_STOLEN = 0.06
"""Share of hidden traffic that still costs time, because it takes multiprocessors and memory bandwidth."""


def step_time(timer: BlockTimer, layout: Layout, micro_batches: int) -> Breakdown:
    """Return the step of the busiest replica, which runs `micro_batches`."""
    block = timer.block(layout)
    embedding, head = timer.ends(layout)
    last = layout.pp - 1
    layers = stage_layers(timer.work, layout, last), stage_layers(timer.work, layout, 0)
    times = [block.total * layers[0] + head.total, block.total * layers[1] + embedding.total]
    middle = max(layers) if layout.pp > 2 else 0
    if layout.pp == 1:
        times = [block.total * layers[0] + head.total + embedding.total]
    fullest = max(*times, middle * block.total)
    own = (
        layers[0]
        if times[0] >= fullest
        else (layers[1] if len(times) > 1 and times[1] >= fullest else middle)
    )
    ends = fullest - own * block.total
    transfer, transfer_hidden = _pipeline(timer, layout)
    bubble = _bubble(timer, layout, fullest + transfer, own)
    count = micro_batches * own
    data, data_hidden = _data(timer, layout, micro_batches)
    return Breakdown(
        forward=count * block.forward,
        backward=count * block.backward,
        recompute=count * block.recompute,
        head=micro_batches * ends,
        tensor=count * block.tensor,
        context=count * block.context,
        expert=count * block.expert,
        pipeline=micro_batches * transfer,
        bubble=bubble,
        data=data,
        optimizer=_optimizer(timer, layout),
        overhead=timer.machine.step_overhead,
        tensor_hidden=count * block.tensor_hidden,
        context_hidden=count * block.context_hidden,
        pipeline_hidden=micro_batches * transfer_hidden,
        data_hidden=data_hidden,
    )


def _pipeline(timer: BlockTimer, layout: Layout) -> tuple[float, float]:
    """Seconds of transfers a micro-batch and stage: exposed, hidden."""
    if layout.pp == 1:
        return 0.0, 0.0
    work, machine = timer.work, timer.machine
    tokens = layout.micro_batch * work.sequence / layout.cp
    moved = work.activation_bytes * tokens * work.shape.hidden
    stride = layout.tp * layout.cp * layout.dp
    scattered = machine.software.pipeline_scatter and layout.tp > 1
    share = layout.tp if layout.sequence_parallel or scattered else 1
    one = send(machine, moved / share, stride, layout.pp)
    if scattered and not layout.sequence_parallel:
        one += scatter_or_gather(machine, group(machine, layout.tp, 1), moved)
    total = 2 * layout.vpp * one
    return (0.0, total) if machine.software.overlap_pipeline else (total, 0.0)


def _bubble(timer: BlockTimer, layout: Layout, stage: float, layers: int) -> float:
    """Seconds that the fullest stage waits while the pipeline fills and drains."""
    if layout.pp == 1:
        return 0.0
    fill = (layout.pp - 1) / layout.vpp
    if layout.schedule == "zero-bubble":
        return (layout.pp - 1) * max(0.0, stage - 2 * layers * timer.block(layout).weight_gradient)
    mean = timer.block(layout).total * timer.work.model.layers / layout.pp
    return fill * min(stage, mean + (stage - mean) / layout.pp)


def _data(timer: BlockTimer, layout: Layout, micro_batches: int) -> tuple[float, float]:
    """Seconds of gradient reduction and weight gathering on the first stage: exposed, hidden."""
    machine, work = timer.machine, timer.work
    weights = stage_parameters(work, layout, 0)
    dense = data_group(machine, layout)
    reduce, gather = _traffic(timer, layout, dense, weights.dense, micro_batches)
    if weights.expert:
        experts = group(machine, max(1, dense.size // layout.ep), layout.tp * layout.ep)
        more = _traffic(timer, layout, experts, weights.expert, micro_batches)
        reduce, gather = reduce + more[0], gather + more[1]
    software = machine.software
    backward, forward = _windows(timer, layout, micro_batches)
    hidden = min(reduce, backward) if software.overlap_gradients else 0.0
    hidden += min(gather, forward) if software.overlap_weights else 0.0
    exposed = reduce + gather - (1 - _STOLEN) * hidden + _tied(timer, layout)
    return exposed, hidden * (1 - _STOLEN)


def _traffic(
    timer: BlockTimer, layout: Layout, where: Group, weights: float, micro_batches: int
) -> tuple[float, float]:
    """Seconds to reduce the gradients and to gather the weights of `weights` parameters, over a whole step."""
    machine, work = timer.machine, timer.work
    gradient = 4.0 if machine.software.gradients == "fp32" or work.activation_bytes == 4 else 2.0
    if layout.zero == 0:
        return all_reduce(machine, where, gradient * weights), 0.0
    passes = micro_batches if layout.zero == 3 else 1
    gathers = 2 * passes if layout.zero == 3 else 1
    reduce = scatter_or_gather(machine, where, gradient * weights)
    return passes * reduce, gathers * scatter_or_gather(machine, where, work.activation_bytes * weights)


def _tied(timer: BlockTimer, layout: Layout) -> float:
    """Seconds to add up the gradients of a tied embedding on the first and the last stage."""
    work, machine = timer.work, timer.machine
    if not work.tied or layout.pp == 1:
        return 0.0
    inside = layout.world_size <= machine.gpus_per_node
    ends = Group(2, 2 if inside else 1, min(machine.gpus_per_node, layout.tp))
    return all_reduce(machine, ends, 4.0 * work.model.vocab * work.shape.hidden / layout.tp)


def _windows(timer: BlockTimer, layout: Layout, micro_batches: int) -> tuple[float, float]:
    """Seconds of compute that gradient reduction and weight gathering can run beside.

    ZeRO-3: every pass. Else gradients are final only in the last micro-batch: its backward pass for the reduction,
    the first forward pass for the gathering; with v chunks a stage, all chunks but one end p micro-batches earlier.
    """
    block, layers = timer.block(layout), max(0, stage_layers(timer.work, layout, 0) - 1)
    backward, forward = layers * (block.backward + block.recompute + block.tensor / 2), layers * block.forward
    if layout.zero == 3:
        return micro_batches * backward, micro_batches * (forward + backward)
    passes = 1.0
    if layout.vpp > 1:
        passes = min(micro_batches, (layout.pp * (layout.vpp - 1) + 1) / layout.vpp)
    return passes * backward, passes * forward


def _optimizer(timer: BlockTimer, layout: Layout) -> float:
    """Norm, clip and update: bytes through memory, shared by the replicas that shard the states."""
    fused = timer.machine.software.fused_optimizer
    weights = stage_parameters(timer.work, layout, 0).total
    if layout.zero:
        weights /= layout.dp * layout.cp
    return timer.kernels.stream((30.0 if fused else 58.0) * weights, 4 if fused else 200)


def pipeline_bubble_ratio(layout: Layout, micro_batches: int) -> float:
    """Idle share of the schedule with equal stages."""
    return bubble_ratio(layout.schedule, layout.pp, layout.vpp, micro_batches)
