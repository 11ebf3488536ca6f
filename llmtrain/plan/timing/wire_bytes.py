"""Bytes that one rank's collectives carry in one optimizer step, by axis: the engine counts the same.

A payload is the size of the whole tensor of a collective (reduced or gathered). What a rank sends of it,
whatever the algorithm's order, is at best 2(n-1)/n of an all-reduce, (n-1)/n of a reduce-scatter, an
all-gather or an all-to-all, and all of a message to the next stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import prod

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory.bucket_packing import (
    PackedBucket,
    Packing,
    default_bucket_bytes,
    encoded_bytes,
    shard_elements,
)
from llmtrain.plan.memory.rank_parameters import is_tied_inside, rank_chunks, rank_parameters
from llmtrain.plan.workload import Workload

Payloads = Mapping[str, Mapping[str, int]]
"""axis -> collective -> bytes a step."""

_SHARE_SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


class WireBytes:
    """The bytes of a workload's ranks under one layout."""

    def __init__(
        self, work: Workload, layout: Layout, *, bucket_bytes: int, levels: tuple[int, ...] = ()
    ) -> None:
        """`levels`: replicas inside a node and across nodes where gradients are summed on two levels."""
        self._work, self._layout = work, layout
        self._levels = levels or (layout.dp,)
        self._axes: tuple[str, ...] = ("dp-inside", "dp-across") if levels else ("dp",)
        self._packing = Packing(layout.zero if layout.dp > 1 else 0, bucket_bytes)
        self._activation = work.activation_bytes * layout.micro_batch * work.sequence * work.shape.hidden

    @property
    def sizes(self) -> dict[str, int]:
        """Members of each axis's group."""
        layout = self._layout
        return {"tp": layout.tp, "ends": 2, **dict(zip(self._axes, self._levels, strict=True))}

    def payloads(self, rank: int) -> dict[str, dict[str, int]]:
        """Bytes of a rank's collectives, by axis and name; what is zero is left out."""
        layout = self._layout
        place = layout.dims.coordinate(rank)
        counts = layout.micro_batches(self._work.global_batch)
        found: dict[str, Counter[str]] = defaultdict(Counter)
        shapes = rank_parameters(self._work, layout, stage=place.pp, tp_index=place.tp)
        for bucket in self._packing.pack(shapes):
            first = shapes[bucket.members[0]]
            uses = 2
            if (
                place.pp == 0 and first.chunk == 0 and first.site == 0
            ):  # an embedding needs no weights backward
                uses = 3 if is_tied_inside(self._work, layout) else 1
            elements = sum(shapes[index].numel for index in bucket.members)
            self._bucket(found, bucket, elements, max(counts), gathers=uses * counts[place.dp])
        for index, layers in rank_chunks(self._work, layout, place.pp):
            self._chunk(found, index, layers, counts[place.dp])
        kept = {axis: {name: size for name, size in names.items() if size} for axis, names in found.items()}
        return {axis: names for axis, names in kept.items() if names}

    # ---- replicas ----------------------------------------------------------------------------------------
    def _bucket(
        self,
        found: dict[str, Counter[str]],
        bucket: PackedBucket,
        elements: int,
        rounds: int,
        *,
        gathers: int,
    ) -> None:
        layout, communication = self._layout, self._work.communication
        is_sharded = layout.zero >= 1 and layout.dp > 1
        shard = shard_elements(elements, layout.dp if is_sharded else 1, communication)
        if not is_sharded:
            shard = -(-shard // layout.dp) * layout.dp
        if bucket.kind == "partial":
            found["tp"]["all_reduce"] += 4 * shard
        if bucket.kind == "shared":
            found["ends"]["all_reduce"] += 4 * shard
        if layout.dp == 1:
            return
        if not is_sharded:
            self._all_reduce(found, shard)
            return
        self._reduce(found, shard * layout.dp, rounds if bucket.releases else 1)
        whole = self._work.activation_bytes * shard * layout.dp
        times = gathers if bucket.gathers else 1
        for number, axis in enumerate(self._axes):
            found[axis]["all_gather"] += times * whole // prod(self._levels[:number])

    def _reduce(self, found: dict[str, Counter[str]], elements: int, rounds: int) -> None:
        communication = self._work.communication
        for axis, size in zip(self._axes, self._levels, strict=True):
            if communication == "fp32":
                found[axis]["reduce_scatter"] += rounds * 4 * elements
            else:
                found[axis]["all_to_all"] += rounds * size * encoded_bytes(elements // size, communication)
            elements //= size

    def _all_reduce(self, found: dict[str, Counter[str]], elements: int) -> None:
        if len(self._levels) == 1:
            found["dp"]["all_reduce"] += 4 * elements
            return
        inside, across = self._axes[0], self._axes[1]
        found[inside]["reduce_scatter"] += 4 * elements
        found[across]["all_reduce"] += 4 * elements // self._levels[0]
        found[inside]["all_gather"] += 4 * elements

    # ---- tensor and pipeline parallel --------------------------------------------------------------------
    def _chunk(self, found: dict[str, Counter[str]], index: int, layers: int, micro_batches: int) -> None:
        layout, last = self._layout, self._layout.pp * self._layout.vpp - 1
        if layout.tp > 1:
            tp = self._layer_collectives()
            for name, count in tp.items():
                found["tp"][name] += micro_batches * layers * count * self._activation
            if index == 0:
                self._embedding(found["tp"], micro_batches)
            if index == last:
                self._head(found["tp"], micro_batches)
        message = self._activation // (layout.tp if layout.sequence_parallel else 1)
        found["pp"]["send"] += micro_batches * message * ((index < last) + (index > 0))

    def _layer_collectives(self) -> dict[str, int]:
        """Collectives of one layer and micro-batch, forward, recomputed and backward."""
        again = 2 if self._layout.recompute == "full" else 1
        if not self._layout.sequence_parallel:
            return {"all_reduce": 2 * again + 2}
        return {"all_gather": 2 * again + 4, "reduce_scatter": 2 * again + 2}

    def _embedding(self, tp: Counter[str], micro_batches: int) -> None:
        if self._layout.sequence_parallel:
            tp["reduce_scatter"] += micro_batches * self._activation
            tp["all_gather"] += micro_batches * self._activation
        else:
            tp["all_reduce"] += micro_batches * self._activation

    def _head(self, tp: Counter[str], micro_batches: int) -> None:
        layout = self._layout
        statistics = layout.tp * 3 * 4 * layout.micro_batch * self._work.sequence
        tp["all_gather"] += micro_batches * statistics
        if layout.sequence_parallel:
            tp["all_gather"] += 2 * micro_batches * self._activation
            tp["reduce_scatter"] += micro_batches * self._activation
        else:
            tp["all_reduce"] += micro_batches * self._activation


def sent_bytes(payloads: Payloads, sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a rank sends, by axis."""
    return {
        axis: sum(
            size if name == "send" else _SHARE_SENT[name] * (sizes[axis] - 1) / sizes[axis] * size
            for name, size in names.items()
        )
        for axis, names in payloads.items()
    }


def replica_levels(layout: Layout, ranks_per_node: int) -> tuple[int, ...]:
    """Replicas that share a node, and nodes that they lie on; nothing where one of both is 1."""
    stride = layout.cp * layout.tp
    inside = max(1, ranks_per_node // stride)
    if ranks_per_node % stride or inside == 1 or inside >= layout.dp or layout.dp % inside:
        return ()
    return inside, layout.dp // inside


def wire_bytes(work: Workload, layout: Layout, machine: Machine) -> dict[str, float]:
    """Bytes that the first rank sends in a step, by axis; nothing for what this engine does not run."""
    if layout.cp > 1 or layout.ep > 1 or work.shape.experts > 1:
        return {}
    bucket = int(work.bucket or default_bucket_bytes(on_cpu=machine.is_cpu))
    per_node = layout.world_size // -(-layout.world_size // machine.gpus_per_node)
    levels = replica_levels(layout, per_node) if work.two_levels else ()
    counted = WireBytes(work, layout, bucket_bytes=bucket, levels=levels)
    return sent_bytes(counted.payloads(0), counted.sizes)
