"""The time of one optimizer step, as a sum of named parts.

Pipeline: the slowest stage works through its m micro-batches; filling and draining adds the other stages'
passes, divided
by the chunks of an interleaved schedule. Data parallel: gradients are reduced and ZeRO weights gathered
beside compute
only where the software does so.
"""

from __future__ import annotations

from dataclasses import replace

from llmtrain.config.layout import Layout
from llmtrain.plan.memory.activations import vocabulary_share
from llmtrain.plan.memory.bookkeeping import BOOKKEEPING
from llmtrain.plan.memory.bucket_packing import SHARE_ON_THE_WIRE, default_bucket_bytes
from llmtrain.plan.plan import Breakdown
from llmtrain.plan.timing.collectives import Group, all_reduce, group, scatter_or_gather, send, shards
from llmtrain.plan.timing.layer_time import BlockTime, BlockTimer, data_group

_STOLEN = 0.22
"""Share of hidden traffic that still costs time, because it takes multiprocessors and memory bandwidth."""

_WORK = (
    *("forward", "backward", "recompute", "head", "tensor", "context", "expert", "pipeline"),
    *("data", "optimizer", "overhead"),
)
"""Parts of a step that keep a core busy."""
_HIDDEN = ("tensor", "context", "pipeline", "data")
"""Those of which some may run beside compute."""
_CPU_HAND_OVER = 150.0
"""Operations that it takes CPU ranks to hand a tensor to the next stage: the schedule's calls at both ends,
those of gloo and its threads, and a sleeper that wakes up to cold caches. Measured: CPU time of two stages
beyond that of one, a message."""
_BUCKET = 40e6
"""Parameters that travel in one call: each call pays the latency of the whole ring."""


def step_time(timer: BlockTimer, layout: Layout, micro_batches: int) -> Breakdown:
    """Return the step of the busiest replica, which runs `micro_batches`."""
    block = timer.block(layout)
    own, ends, others = _slowest_stage(timer, layout, block)
    transfer, transfer_hidden = _pipeline(timer, layout)
    data, data_hidden = _data(timer, layout, block, micro_batches)
    count = micro_batches * own
    parts = Breakdown(
        forward=count * block.forward,
        backward=count * block.backward,
        recompute=count * block.recompute,
        head=micro_batches * ends,
        tensor=count * block.tensor,
        context=count * block.context,
        expert=count * block.expert,
        pipeline=micro_batches * transfer,
        bubble=_bubble(layout, block, own, others + (layout.pp - 1) * transfer),
        data=data,
        optimizer=_optimizer(timer, layout),
        overhead=timer.machine.step_overhead,
        tensor_hidden=count * block.tensor_hidden,
        context_hidden=count * block.context_hidden,
        pipeline_hidden=micro_batches * transfer_hidden,
        data_hidden=data_hidden,
    )
    if not timer.machine.is_cpu:
        return parts
    beside = timer.work.model.layers * (block.tensor_hidden + block.context_hidden)
    whole = micro_batches * (own * block.total + ends + others + beside) / layout.pp
    return _on_shared_cores(timer, layout, parts, whole)


def _on_shared_cores(timer: BlockTimer, layout: Layout, parts: Breakdown, passes: float) -> Breakdown:
    """CPU ranks that share cores: a rank that waits lends its core, so a step is all ranks' work over the
    cores. Nothing is hidden there: what moves data is a core that does not compute.

    `passes`: seconds that a rank of an average stage works.
    """
    ranks = min(layout.tp * layout.cp * layout.dp * layout.pp, timer.machine.gpus_per_node)
    shown = {name: getattr(parts, name) + getattr(parts, f"{name}_hidden") for name in _HIDDEN}
    # Between p stages there are p - 1 borders; a stage between two others works at two of them.
    shown["pipeline"] *= (layout.pp - 1) / layout.pp
    busy = passes + shown["pipeline"] + shown["data"] + parts.optimizer + parts.overhead
    shared, alone = busy * ranks / timer.machine.cores, parts.total
    if shared <= alone:
        return parts
    parts = replace(parts, **shown, **{f"{name}_hidden": 0.0 for name in _HIDDEN}, bubble=0.0)
    factor = shared / parts.total
    return replace(parts, **{name: getattr(parts, name) * factor for name in _WORK})


def _slowest_stage(timer: BlockTimer, layout: Layout, block: BlockTime) -> tuple[int, float, float]:
    """Layers of the slowest stage, seconds of its embedding or head, and seconds of all other stages
    together.
    """
    embedding, head = timer.ends(layout)
    layers = timer.work.stage_layers(layout)
    ends = embedding.total + head.total
    if layout.pp == 1:
        return layers[0], ends, 0.0
    stages = [(layers[-1], head.total), (layers[0], embedding.total), (max(layers[1:-1], default=0), 0.0)]
    own, extra = max(stages, key=lambda stage: stage[0] * block.total + stage[1])
    whole = timer.work.model.layers * block.total + ends
    return own, extra, whole - own * block.total - extra


def _bubble(layout: Layout, block: BlockTime, own: int, others: float) -> float:
    """Seconds that the slowest stage waits while the pipeline fills and drains."""
    if layout.pp == 1:
        return 0.0
    if layout.schedule == "zero-bubble":
        return max(0.0, others - (layout.pp - 1) * 2 * own * block.weight_gradient)
    return others / layout.vpp


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
    if machine.is_cpu:
        one += _CPU_HAND_OVER * machine.launch_gap
    total = 2 * layout.vpp * one
    hidden = (1 - _STOLEN) * total if machine.software.overlap_pipeline else 0.0
    return total - hidden, hidden


def _data(timer: BlockTimer, layout: Layout, block: BlockTime, micro_batches: int) -> tuple[float, float]:
    """Seconds of gradient reduction and weight gathering on the first stage: exposed, hidden."""
    software = timer.machine.software
    reduce, gather = _traffic_of_stage(timer, layout)
    if layout.zero >= 2 and not _waits(timer, layout):
        reduce *= micro_batches
        gather *= 2 * micro_batches if layout.zero == 3 else 1
    hidden = 0.0
    if software.overlap_gradients or software.overlap_weights:
        backward, forward = _windows(timer, layout, block, micro_batches)
        hidden += min(reduce, backward) if software.overlap_gradients else 0.0
        hidden += min(gather, forward) if software.overlap_weights else 0.0
    exposed = reduce + gather - (1 - _STOLEN) * hidden + _tied(timer, layout)
    return exposed, hidden * (1 - _STOLEN)


def _waits(timer: BlockTimer, layout: Layout) -> bool:
    """Whether sharded weights stay gathered, and gradients whole, until the last micro-batch is done."""
    return BOOKKEEPING[timer.machine.software.framework].waits_in_pipelines and layout.pp > 1


def _traffic_of_stage(timer: BlockTimer, layout: Layout) -> tuple[float, float]:
    """Seconds to reduce the first stage's gradients once, and to gather its weights once."""
    machine = timer.machine
    weights = timer.weights(layout)
    dense = data_group(machine, layout)
    reduce, gather = _traffic(timer, layout, dense, weights.dense)
    if weights.expert:
        experts = group(machine, max(1, dense.size // layout.ep), layout.tp * layout.ep)
        more = _traffic(timer, layout, experts, weights.expert)
        reduce, gather = reduce + more[0], gather + more[1]
    return reduce, gather


def _traffic(timer: BlockTimer, layout: Layout, where: Group, weights: float) -> tuple[float, float]:
    machine, element = timer.machine, timer.work.activation_bytes
    gradient = 4.0 if machine.software.gradients == "fp32" or element == 4 else 2.0
    gradient = min(gradient, 4.0 * SHARE_ON_THE_WIRE[timer.work.communication])
    calls = max(1.0, weights / _elements_a_call(timer, layout))
    levels = _levels(timer, layout, where)
    if levels:
        return _on_two_levels(timer, layout, levels, (gradient * weights, element * weights), calls)
    if layout.zero == 0:
        return all_reduce(machine, where, gradient * weights, calls), 0.0
    inside = shards(machine, where.size, layout.tp)
    within = Group(inside, inside, 1) if inside < where.size else where
    gather = scatter_or_gather(machine, within, element * weights, calls)
    if layout.zero < 3 and BOOKKEEPING[machine.software.framework].whole_reduction:
        return all_reduce(machine, where, gradient * weights, calls), gather
    reduce = scatter_or_gather(machine, within, gradient * weights, calls)
    if inside < where.size:
        across = group(machine, where.size // inside, layout.tp * inside)
        reduce += all_reduce(machine, across, gradient * weights / inside, calls)
    return reduce, gather


def _levels(timer: BlockTimer, layout: Layout, where: Group) -> tuple[Group, Group] | None:
    """Replicas that share a node, and nodes, where this engine sums gradients on two levels."""
    machine, inside = timer.machine, where.per_node
    is_own = (
        machine.software.framework == "llmtrain" and timer.work.two_levels and layout.cp == layout.ep == 1
    )
    if not is_own or inside == 1 or inside >= where.size or where.size % inside:
        return None
    return Group(inside, inside, 1), group(machine, where.size // inside, layout.tp * inside)


def _on_two_levels(
    timer: BlockTimer, layout: Layout, levels: tuple[Group, Group], moved: tuple[float, float], calls: float
) -> tuple[float, float]:
    """Seconds to reduce gradients and to gather weights, `moved` bytes of each: inside the nodes, and the
    shares of the nodes' ranks across them."""
    machine, (inside, across) = timer.machine, levels

    def both(size: float) -> float:
        within = scatter_or_gather(machine, inside, size, calls)
        return within + scatter_or_gather(machine, across, size / inside.size, calls)

    if layout.zero:
        return both(moved[0]), both(moved[1])
    return 2 * scatter_or_gather(machine, inside, moved[0], calls) + all_reduce(
        machine, across, moved[0] / inside.size, calls
    ), 0.0


def _elements_a_call(timer: BlockTimer, layout: Layout) -> float:
    """Parameters that travel in one call: a bucket, and of ZeRO-3 a block or a matrix; Megatron's buckets
    grow with the ring, so that its latency does not count."""
    framework = timer.machine.software.framework
    if framework == "deepspeed" and layout.zero == 3:
        return max(_BUCKET, timer.work.shape.hidden * timer.work.shape.ffn_hidden / layout.tp)
    if framework == "fsdp" or (layout.zero == 3 and framework == "megatron"):
        return max(_BUCKET, timer.work.shape.parameters / layout.tp)
    if framework == "megatron":
        return max(_BUCKET, 1e6 * layout.dp * layout.cp)
    if framework == "llmtrain":
        return (timer.work.bucket or default_bucket_bytes(on_cpu=timer.machine.is_cpu)) / 4.0
    return _BUCKET


def _tied(timer: BlockTimer, layout: Layout) -> float:
    """Seconds to add up the gradients of a tied embedding on the first and the last stage."""
    work, machine = timer.work, timer.machine
    if not work.tied or layout.pp == 1:
        return 0.0
    inside = layout.tp * layout.cp * layout.dp * layout.pp <= machine.gpus_per_node
    ends = Group(2, 2 if inside else 1, min(machine.gpus_per_node, layout.tp))
    return all_reduce(machine, ends, 4.0 * vocabulary_share(work, layout) * work.shape.hidden)


def _windows(timer: BlockTimer, layout: Layout, block: BlockTime, micro_batches: int) -> tuple[float, float]:
    """Seconds of compute that gradient reduction and weight gathering can run beside.

    ZeRO-2 and 3: every pass. Else gradients are final only in the last micro-batch: its backward pass for the
    reduction,
    the first forward pass for the gathering; with v chunks a stage, all chunks but one end p micro-batches
    earlier.
    """
    layers = max(0, timer.work.stage_layers(layout)[0] - 1)
    backward = layers * (block.backward + block.recompute + block.tensor / 2)
    forward = layers * block.forward
    if layout.zero >= 2 and not _waits(timer, layout):
        gathering = micro_batches * (forward + backward) if layout.zero == 3 else forward
        return micro_batches * backward, gathering
    passes = 1.0
    if layout.vpp > 1:
        passes = min(micro_batches, (layout.pp * (layout.vpp - 1) + 1) / layout.vpp)
    return passes * backward, passes * forward


def _optimizer(timer: BlockTimer, layout: Layout) -> float:
    """Norm, clip and update: bytes through memory, shared by the replicas that shard the states."""
    fused = timer.machine.software.fused_optimizer
    weights = timer.weights(layout).total
    if layout.zero:
        weights /= shards(timer.machine, layout.dp * layout.cp, layout.tp)
    return timer.kernels.stream((30.0 if fused else 58.0) * weights, 4 if fused else 200)
