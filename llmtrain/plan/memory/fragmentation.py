"""Bytes that a caching allocator holds and cannot give out."""

from __future__ import annotations

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory.activations import (
    activation_sizes,
    logit_bytes,
    loss_is_the_peak,
    vocabulary_share,
)
from llmtrain.plan.memory.bookkeeping import BOOKKEEPING
from llmtrain.plan.workload import Workload

SLACK = 0.08
"""Share of activations and working buffers lost to the allocator's fragmentation."""

_GATHERS_WITH_PRODUCTS = 0.5
"""Share of hidden tensor-parallel traffic that is reached only where products gather their own inputs."""


def around_the_loss(work: Workload, layout: Layout, machine: Machine, stage: int) -> float:
    """Bytes of slack at the peak of an eager loss, beside `SLACK` of everything; may be negative.

    Its FP32 tensors are the largest there are, each in a segment of its own: no share of them is lost. But
    what was freed just before is too small for them and stays without use: the half-precision logits and,
    where tensor-parallel ranks gather the sequence, a whole input and the copy in which the shares of the
    ranks were put in order. (An all-gather that runs with its product has neither in the allocator.)
    """
    habits, software = BOOKKEEPING[machine.software.framework], machine.software
    if not habits.logits_leave_holes or software.fused_loss or stage < layout.pp - 1:
        return 0.0
    if not loss_is_the_peak(work, layout, machine, stage):
        return 0.0
    element, tokens, hidden, shard = activation_sizes(work, layout)
    holes = element * tokens * vocabulary_share(work, layout)
    if shard > 1 and habits.whole_inputs and software.overlap_tensor < _GATHERS_WITH_PRODUCTS:
        holes += 2 * element * hidden
    return holes - SLACK * logit_bytes(work, layout, machine)
