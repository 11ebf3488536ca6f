"""Quick bounds of what a rank of this engine holds beside its states, from a few sizes of one block.

The exact sum (`engine_memory`) looks at every tensor, a hundred times slower; the search asks for it only
where these bounds do not decide.
"""

from __future__ import annotations

from llmtrain.config.layout import Layout
from llmtrain.plan.memory.bucket_packing import BUCKETS_AT_ONCE
from llmtrain.plan.memory.engine_block import BlockBytes
from llmtrain.plan.memory.rank_parameters import vocabulary_rows
from llmtrain.plan.timing.schedules import micro_batches_in_flight, waiting_buffers
from llmtrain.plan.workload import Workload

_SURE = 0.98
"""Share of what is kept in flight that is there at the fullest moment in any schedule."""


def at_least(work: Workload, layout: Layout, sizes: BlockBytes, micro_batches: int, stage: int) -> float:
    """Bytes of activations that a rank of the first stage holds at some moment; of the last stage, where
    weight gradients are put off."""
    layers = work.stage_layers(layout)[stage]
    if stage == 0:
        alive = micro_batches_in_flight(layout.schedule, layout.pp, layout.vpp, micro_batches, 0)
        return _SURE * layers * alive * sizes.kept()
    # Those of as many micro-batches wait there as there are stages.
    return _SURE * layers * min(micro_batches, layout.pp) * sizes.put_off


def at_most(work: Workload, layout: Layout, sizes: BlockBytes, micro_batches: int, bucket: int) -> float:
    """Bytes that no rank of any stage has beside its states: what blocks keep in flight and, generously, all
    that comes and goes. Not the whole gradients that zero bubble holds under ZeRO-2 and 3."""
    alive = micro_batches_in_flight(layout.schedule, layout.pp, layout.vpp, micro_batches, 0)
    layers, tokens = max(work.stage_layers(layout)), layout.micro_batch * work.sequence
    rows = vocabulary_rows(work.model.vocab, layout.tp, 0)[1]
    vocabulary, matrices = rows * work.shape.hidden, sizes.down + sizes.into + sizes.out + sizes.qkv
    logits = work.activation_bytes * rows * tokens
    # Each chunk in flight keeps what it hands on, positions and masks.
    each = 2 * sizes.own + tokens * (10 + 4 * work.shape.head_dim * work.packs_documents) + sizes.bias
    ends = (alive * layout.vpp + 2) * each + (alive + 6) * logits + 8 * vocabulary
    ends += waiting_buffers(layout.schedule, layout.pp, layout.vpp, 0) * sizes.own
    found = layers * alive * sizes.kept() / _SURE + ends + 3 * sizes.kept("none") + 6 * sizes.whole + matrices
    if sizes.puts_off:
        found += alive * (layers * sizes.put_off + sizes.whole)
    if layout.zero >= 2 and layout.dp > 1:
        found += 2 * BUCKETS_AT_ONCE * max(bucket, 4 * vocabulary, 2 * matrices) + 3 * matrices
    return found
