"""Seconds of one transformer block, of the embedding and of the output head, for one micro-batch on one
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory.bookkeeping import BOOKKEEPING
from llmtrain.plan.memory.model import StageParameters, stage_parameters
from llmtrain.plan.timing.collectives import Group, all_reduce, all_to_all, group, scatter_or_gather
from llmtrain.plan.timing.kernels import Kernels
from llmtrain.plan.workload import Workload

_EAGER_NORM = 11.3
"""Extra passes over the hidden state of an RMSNorm written in single operations (a fifth of that for
LayerNorm).
"""
_EAGER_ROTARY = 10.0
"""Extra passes over queries, keys and values of rotary positions written in single operations."""
_EAGER_ACTIVATION = 1.8
"""Extra passes over the feed-forward activations."""
_CPU_KERNELS = (39.0, 60.0)
"""Operations of a block of this engine on CPUs beside products and attention, forward and backward."""
_CPU_END_KERNELS = (4.0, 58.0)
"""The same of the embedding, and of the head with its loss; with what a stage does once a micro-batch."""
_CPU_AGAIN = {"none": 0.0, "selective": 6.0, "full": 58.0}
"""Operations that autograd's book-keeping of what runs again costs there beside it, a block."""
_CPU_WAKE = 2.0
"""Times a ring's seconds that a sum costs CPU ranks that stand still for it, measured: they sleep, are woken
up, and find other data in their caches."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of one block and micro-batch."""

    forward: float
    """Kernels of the forward pass."""
    backward: float
    """Kernels of the backward pass, without recomputation."""
    weight_gradient: float
    """The part of `backward` that only weight gradients need."""
    recompute: float
    """Kernels run again during the backward pass."""
    tensor: float
    """Exposed tensor-parallel traffic, recomputation included."""
    tensor_hidden: float
    context: float
    """Exposed context-parallel traffic."""
    context_hidden: float
    expert: float
    """Expert-parallel traffic."""

    @property
    def total(self) -> float:
        """Everything that takes time."""
        return self.forward + self.backward + self.recompute + self.tensor + self.context + self.expert


@dataclass(frozen=True, slots=True)
class EndTime:
    """Seconds of the embedding or the head for one micro-batch."""

    compute: float
    tensor: float

    @property
    def total(self) -> float:
        """Both."""
        return self.compute + self.tensor


class BlockTimer:
    """Times blocks of one workload on one machine; results are remembered by what they depend on."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self.work = work
        self.machine = machine
        self.kernels = Kernels(machine, work.mode)
        self.rms_norm = work.is_rms_norm
        self._blocks: dict[tuple[object, ...], BlockTime] = {}
        self._ends: dict[tuple[object, ...], tuple[EndTime, EndTime]] = {}
        self._weights: dict[tuple[object, ...], StageParameters] = {}

    def block(self, layout: Layout) -> BlockTime:
        """Seconds of one block."""
        key = (
            layout.tp,
            layout.cp,
            layout.ep,
            layout.micro_batch,
            layout.sequence_parallel,
            layout.recompute,
        )
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._time_block(layout)
        return found

    def ends(self, layout: Layout) -> tuple[EndTime, EndTime]:
        """Seconds of the embedding and of the head with its loss, forward and backward."""
        key = (layout.tp, layout.cp, layout.micro_batch, layout.sequence_parallel)
        found = self._ends.get(key)
        if found is None:
            found = self._ends[key] = self._time_ends(layout)
        return found

    def weights(self, layout: Layout) -> StageParameters:
        """Parameters of a rank of the first stage."""
        key = (layout.tp, layout.ep, layout.pp, layout.vpp, layout.recompute == "full")
        found = self._weights.get(key)
        if found is None:
            found = self._weights[key] = stage_parameters(self.work, layout, 0)
        return found

    # ---- kernels of a block --------------------------------------------------------------------
    def _time_block(self, layout: Layout) -> BlockTime:
        products = self._products(layout)
        core = self._core(layout)
        streams = self._streams(layout)
        forward = products[0] + core[0] + streams[0]
        backward = products[1] + products[2] + core[1] + streams[1]
        recompute, passes = self._again(layout, products[0], core[0], streams[0])
        sums = passes
        if self.machine.is_cpu:
            recompute += self.kernels.stream(0.0, _CPU_AGAIN[layout.recompute])
            # The backward pass's sums travel while its weight gradients are computed; the others do not.
            sums = _CPU_WAKE * (passes - 1.0)
        tensor = self._tensor(layout, sums)
        hidden = tensor * self.machine.software.overlap_tensor
        exchange = self._context(layout) * passes
        beside = min(exchange, core[0] + core[1]) * (1.0 - 1.0 / max(2, layout.cp))
        return BlockTime(
            forward=forward,
            backward=backward,
            weight_gradient=products[2],
            recompute=recompute,
            tensor=tensor - hidden,
            tensor_hidden=hidden,
            context=exchange - beside,
            context_hidden=beside,
            expert=self._expert(layout) * passes,
        )

    def _again(self, layout: Layout, products: float, core: float, streams: float) -> tuple[float, float]:
        """Seconds run again in the backward pass, and how often a pass's traffic is sent."""
        software = self.machine.software
        if layout.recompute == "full":
            return products + core + streams, 3.0
        if layout.recompute == "none":
            return 0.0, 2.0
        if BOOKKEEPING[software.framework].lean_selective:
            return streams, 2.0
        return {
            "attention": (core, 2.0),
            "operators": (0.5 * products + streams, 2.5),
            "alternate-layers": (0.5 * (products + core + streams), 2.5),
        }[software.selective_recompute]

    def _products(self, layout: Layout) -> tuple[float, float, float]:
        """Forward, input-gradient and weight-gradient products of the linear layers."""
        shape, tp = self.work.shape, layout.tp
        tokens = layout.micro_batch * self.work.sequence / layout.cp
        hidden, width = shape.hidden, shape.heads * shape.head_dim
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        up = (2 if shape.gated else 1) * shape.ffn_hidden
        sizes = [(tokens, qkv / tp, hidden, 1), (tokens, hidden, width / tp, 1)]
        local = shape.experts / layout.ep
        rows = tokens * shape.experts_per_token / shape.experts * layout.ep if shape.experts > 1 else tokens
        copies = round(local) if shape.experts > 1 else 1
        sizes += [(rows, up / tp, hidden, copies), (rows, hidden, shape.ffn_hidden / tp, copies)]
        if shape.router:
            sizes.append((tokens, shape.experts, hidden, 1))
        product = self.kernels.product
        forward = sum(product(m, n, k, groups=count) for m, n, k, count in sizes)
        inputs = sum(product(m, k, n, groups=count) for m, n, k, count in sizes)
        weights = sum(product(k, n, m, accumulate=True, groups=count) for m, n, k, count in sizes)
        return forward, inputs, weights

    def _core(self, layout: Layout) -> tuple[float, float]:
        shape = self.work.shape
        rows = self.work.sequence / layout.cp
        heads = shape.heads / layout.tp
        kind = self.kernels.attention if self.machine.software.attention != "unfused" else self.kernels.scores
        return kind(heads, rows, self.work.sequence, shape.head_dim, layout.micro_batch)

    def _streams(self, layout: Layout) -> tuple[float, float]:
        """Norms, biases, activation, rotary positions, residual adds: bytes through memory, forward and
        backward.
        """
        shape, software, tp = self.work.shape, self.machine.software, layout.tp
        element = self.work.activation_bytes
        tokens = layout.micro_batch * self.work.sequence / layout.cp
        hidden = tokens * shape.hidden / (tp if layout.sequence_parallel else 1)
        qkv = tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim / tp
        routed = shape.experts_per_token if shape.experts > 1 else 1
        inner = routed * tokens * shape.ffn_hidden / tp
        masks = 0.5 if software.dropout else 0.0
        eager = 0.0 if software.fused_kernels else 1.0
        rms = 1.0 if self.rms_norm else 0.0
        norm = element * hidden * (2 + _EAGER_NORM * eager * (0.2 + 0.8 * rms))
        residual = (3 + masks) * element * hidden
        projection = element * qkv * (3 + _EAGER_ROTARY * eager * (self.work.model.rope is not None))
        activation = element * inner * ((3 if shape.gated else 2) + _EAGER_ACTIVATION * eager)
        shuffle = 4 * element * routed * tokens * shape.hidden / tp if routed > 1 else 0.0
        kernels = _CPU_KERNELS if self.machine.is_cpu else (7 + 9 * eager, 14 + 18 * eager)
        forward = 2 * norm + 2 * residual + projection + activation + shuffle
        backward = 2 * 2.5 * norm + 2 * residual + projection + 2 * activation + shuffle
        scaled = self._quantise(layout)
        stream = self.kernels.stream
        return stream(forward + scaled[0], kernels[0]), stream(backward + scaled[1], kernels[1])

    def _quantise(self, layout: Layout) -> tuple[float, float]:
        """Bytes to cast the inputs and the output gradients of all linear layers to FP8, with transposed
        copies.
        """
        if self.work.mode != "fp8":
            return 0.0, 0.0
        shape, tp = self.work.shape, layout.tp
        tokens = layout.micro_batch * self.work.sequence / layout.cp
        passes = 4 + {"delayed": 0, "tensor": 2, "row": 10}[self.machine.software.fp8_scaling]
        routed = shape.experts_per_token if shape.experts > 1 else 1
        width = shape.heads * shape.head_dim
        inputs = shape.hidden + width / tp + routed * (shape.hidden + shape.ffn_hidden / tp)
        up = (2 if shape.gated else 1) * shape.ffn_hidden
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        outputs = qkv / tp + shape.hidden + routed * (up / tp + shape.hidden)
        return passes * tokens * inputs, passes * tokens * outputs

    # ---- traffic of a block --------------------------------------------------------------------
    def _tensor(self, layout: Layout, passes: float) -> float:
        if layout.tp == 1:
            return 0.0
        where = group(self.machine, layout.tp, 1)
        moved = self._hidden_bytes(layout)
        if not layout.sequence_parallel:
            return passes * 2 * all_reduce(self.machine, where, moved)
        one = scatter_or_gather(self.machine, where, moved)
        if self.work.mode == "fp8" and self.machine.software.fp8_gather:
            half = scatter_or_gather(self.machine, where, moved / 2)
            return (passes * 4 - 2 * (passes - 1)) * one + 2 * (passes - 1) * half
        return passes * 4 * one

    def _context(self, layout: Layout) -> float:
        """Keys and values of all other context-parallel ranks, once a pass."""
        if layout.cp == 1:
            return 0.0
        shape = self.work.shape
        where = group(self.machine, layout.cp, layout.tp)
        tokens = layout.micro_batch * self.work.sequence
        pair = 2 * self.work.activation_bytes * tokens * shape.kv_heads * shape.head_dim / layout.tp
        return scatter_or_gather(self.machine, where, pair)

    def _expert(self, layout: Layout) -> float:
        """Tokens to their experts and back, once a pass."""
        if layout.ep == 1:
            return 0.0
        where = group(self.machine, layout.ep, layout.tp)
        moved = self._hidden_bytes(layout) * self.work.shape.experts_per_token / layout.tp
        return 2 * all_to_all(self.machine, where, moved)

    def _hidden_bytes(self, layout: Layout) -> float:
        tokens = layout.micro_batch * self.work.sequence / layout.cp
        return self.work.activation_bytes * tokens * self.work.shape.hidden

    # ---- ends ----------------------------------------------------------------------------------
    def _time_ends(self, layout: Layout) -> tuple[EndTime, EndTime]:
        kernels, tp = self.kernels, layout.tp
        tokens = layout.micro_batch * self.work.sequence / layout.cp
        hidden, logits = self.work.shape.hidden, ceil(self.work.model.vocab / tp)
        moved = self._hidden_bytes(layout)
        where = group(self.machine, tp, 1)
        one = all_reduce(self.machine, where, moved) if tp > 1 else 0.0
        counts = _CPU_END_KERNELS if self.machine.is_cpu else (4.0, 13.0)
        embedding = EndTime(kernels.stream(4 * moved, counts[0]), one)
        products = (
            kernels.product(tokens, logits, hidden, linear=False)
            + kernels.product(tokens, hidden, logits, linear=False)
            + kernels.product(hidden, logits, tokens, accumulate=True, linear=False)
        )
        # A fused loss reads the logits twice and writes their gradient; else copies in FP32 come and go.
        element = self.work.activation_bytes
        moves = 3 * element if self.machine.software.fused_loss else 6 * 4 + 2 * element
        losses = moves * tokens * logits
        passes = kernels.stream(losses + 5 * moved, counts[1])
        return embedding, EndTime(products + passes, 2 * one)


def data_group(machine: Machine, layout: Layout) -> Group:
    """Ranks that reduce gradients together: data and context parallel."""
    return group(machine, layout.dp * layout.cp, layout.tp)
