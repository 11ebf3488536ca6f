"""Process groups by axis, with counters: one `Group` object is the only way to a collective.

A group of one rank answers at once and counts nothing, so that callers never ask for the degree.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.engine.flight import Lane, flight
from llmtrain.engine.parallel.node_levels import node_levels, some_span_nodes
from llmtrain.engine.parallel.shared_memory import SharedMemory, open_shared_memory
from llmtrain.parallel_dims import Coordinate, ParallelDims

# The newer names exist from torch 2.13 on, where the older ones warn on every call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


LEVELS = ("dp-inside", "dp-across")
"""Axes of the two levels of a reduction over nodes."""


@dataclass(slots=True)
class Traffic:
    """What a group did so far."""

    calls: Counter[str] = field(default_factory=Counter)
    """Collectives by name."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the full (gathered or reduced) tensor, by name."""
    seconds: float = 0.0
    """Time that this rank stood still for them."""
    lane: Lane = flight.lane_of_nobody
    """Where each is noted, for whoever has to find out why a rank hangs."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count a collective, or a message to one member (`send`)."""
        self.calls[name] += 1
        self.bytes[name] += tensor.numel() * tensor.element_size()

    def clear(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.bytes.clear()
        self.seconds = 0.0


class Pending:
    """A collective under way; `wait` returns when its result may be used."""

    __slots__ = ("_arrive", "_finish", "_traffic")

    def __init__(
        self,
        traffic: Traffic | None = None,
        arrive: Callable[[], Any] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._traffic, self._arrive, self._finish = traffic, arrive, finish

    def wait(self) -> None:
        """Wait, and run what the collective left to be done on this rank. Idempotent."""
        if self._arrive is not None and self._traffic is not None:
            started = time.perf_counter()
            self._traffic.lane.wait()
            self._arrive()
            self._arrive = None
            self._traffic.lane.finish()
            self._traffic.seconds += time.perf_counter() - started
        if self._finish is not None:
            self._finish()
            self._finish = None


DONE = Pending()


class Group:
    """Ranks that work together on one axis. `index` is this rank's place among `ranks`, in rank order."""

    def __init__(
        self, axis: str, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None
    ) -> None:
        self.axis = axis
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.size = len(ranks)
        self.handle = handle
        self._connections = deque([handle])
        self.traffic = Traffic(lane=flight.lane(axis, ranks))
        self._local: SharedMemory | None = None
        # gloo adds BF16 numbers one by one; a gather and one vectorised addition moves as much and costs a
        # third.
        self._gathers_small = handle is not None and handle.name() == "gloo" and self.size <= 4
        # gloo's reduce-scatter is an all-reduce that forgets: it moves twice what is needed.
        self._exchanges_parts = handle is not None and handle.name() == "gloo"

    def add_connection(self) -> None:
        """Let large tensors take turns with one more process group of the same ranks; all members call it.

        gloo asks a receiver before it sends, on the connection of the data: question and answer wait behind
        the data of the operation before, and the link falls idle.
        """
        self._connections.append(dist.new_group(list(self.ranks), use_local_synchronization=True))

    def _next_connection(self) -> dist.ProcessGroup | None:
        self._connections.rotate(-1)
        return self._connections[0]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the group, in place."""
        self.start_all_reduce(tensor).wait()
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Begin to sum a contiguous tensor over the group, in place."""
        if self.size == 1:
            return DONE
        if self._local is not None and self._local.fits(tensor):
            self._count("all_reduce", tensor)
            return Pending(self.traffic, self._local.start_all_reduce(tensor))
        if self._gathers_small and tensor.dtype == torch.bfloat16:
            return self._start_gather_and_add(tensor)
        self._count("all_reduce", tensor)
        return Pending(self.traffic, dist.all_reduce(tensor, group=self.handle, async_op=True).wait)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the members' equally shaped tensors along the first dimension."""
        if self.size == 1:
            return tensor
        full = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self.start_all_gather(full, tensor).wait()
        return full

    def start_all_gather(self, full: torch.Tensor, part: torch.Tensor) -> Pending:
        """Begin to gather `part` of every member into `full`, [size x first, ...]; `part` may be its own
        place there."""
        if self.size == 1:
            if full.data_ptr() != part.data_ptr():
                full.copy_(part)
            return DONE
        self._count("all_gather", full)
        if self._local is not None and self._local.fits(part):
            return Pending(self.traffic, self._local.start_all_gather(full, part))
        work = _all_gather(full, part.contiguous(), group=self._next_connection(), async_op=True)
        return Pending(self.traffic, work.wait)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the group; keep this member's part of the first dimension."""
        if self.size == 1:
            return tensor
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        self.start_reduce_scatter(part, tensor.contiguous()).wait()
        return part

    def start_reduce_scatter(self, part: torch.Tensor, full: torch.Tensor) -> Pending:
        """Begin to sum `full` over the group; `part` gets this member's share of the first dimension."""
        if self.size == 1:
            if full.data_ptr() != part.data_ptr():
                part.copy_(full)
            return DONE
        self._count("reduce_scatter", full)
        if self._local is not None and self._local.fits(full):
            return Pending(self.traffic, self._local.start_reduce_scatter(part, full))
        if self._exchanges_parts:
            return self._start_exchange_and_add(part, full)
        return Pending(self.traffic, _reduce_scatter(part, full, group=self.handle, async_op=True).wait)

    def start_all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        """Begin to send row i of `sent`, [size, ...], to member i; row i of `received` comes from member
        i."""
        if self.size == 1:
            received.copy_(sent)
            return DONE
        self._count("all_to_all", sent)
        work = dist.all_to_all_single(received, sent, group=self._next_connection(), async_op=True)
        return Pending(self.traffic, work.wait)

    def _start_exchange_and_add(self, part: torch.Tensor, full: torch.Tensor) -> Pending:
        received = torch.empty_like(full).view(self.size, *part.shape)
        work = dist.all_to_all_single(
            received.flatten(), full.flatten(), group=self._next_connection(), async_op=True
        )

        def add() -> None:
            # In rank order, as ever.
            torch.add(received[0], received[1], out=part)
            for other in received[2:]:
                part.add_(other)

        return Pending(self.traffic, work.wait, add)

    def _start_gather_and_add(self, tensor: torch.Tensor) -> Pending:
        self._count("all_reduce", tensor)
        parts = tensor.new_empty((self.size, *tensor.shape))
        work = _all_gather(parts.flatten(), tensor.flatten(), group=self.handle, async_op=True)

        def add() -> None:
            # Always in rank order, so that every member computes the same bits.
            torch.add(parts[0], parts[1], out=tensor)
            for part in parts[2:]:
                tensor.add_(part)

        return Pending(self.traffic, work.wait, add)

    def use_shared_memory(self, slot_bytes: int) -> None:
        """From now on, let tensors of up to `slot_bytes` go through the host's shared memory, if all
        members are on one host and it has enough. For tensors on a CPU; every member must call it."""
        if self.size > 1:
            self._local = open_shared_memory(self.index, self.size, slot_bytes, self.exchange)

    def exchange(self, text: str, device: torch.device | None = None) -> Sequence[str]:
        """Gather one text from every member, in rank order; a barrier. `device` is where the group's
        tensors lie."""
        if self.size == 1:
            return [text]
        content = text.encode()
        lengths = self.all_gather(torch.tensor([len(content)], device=device)).tolist()
        row = torch.frombuffer(bytearray(content.ljust(max(lengths) + 1)), dtype=torch.uint8).to(device)
        rows = self.all_gather(row.unsqueeze(0)).cpu()
        return [bytes(rows[member, : lengths[member]].tolist()).decode() for member in range(self.size)]

    def _count(self, name: str, tensor: torch.Tensor) -> None:
        self.traffic.lane.enter(name)
        self.traffic.add(name, tensor)


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of one rank."""

    dims: ParallelDims
    rank: int
    place: Coordinate
    world: Group
    dp: Group
    tp: Group
    pp: Group
    ends: Group
    """First and last pipeline stage of this rank's column: they share a tied embedding. One rank
    elsewhere."""
    levels: tuple[Group, ...]
    """The replicas for two-level reduction: those of this rank's node, and its counterparts on other nodes.
    `dp` alone where that is no gain."""

    def all(self) -> tuple[Group, ...]:
        """Every group once."""
        levels = self.levels if len(self.levels) > 1 else ()
        return (self.world, self.dp, self.tp, self.pp, self.ends, *levels)


def build_groups(
    dims: ParallelDims, rank: int, ranks_per_node: int = 0, *, two_levels: bool = True
) -> Groups:
    """Make this rank's groups; every rank of the world must call it. A world of one needs no torch process
    group. `ranks_per_node` says which ranks share a node, 0 that nobody knows; with `two_levels`, replicas
    that share nodes get a group for each level."""
    place = dims.coordinate(rank)
    alone = dims.world_size == 1
    level_size = ranks_per_node if two_levels else 0
    levels = node_levels(dims.group_of(rank, "dp"), rank, level_size)
    some_have_levels = any(node_levels(ranks, ranks[0], level_size) for ranks in dims.groups("dp"))

    def group(axis: str, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == 1 or alone:
            return Group(axis, (rank,), rank, None)
        handle = dist.group.WORLD
        if axis != "world":
            handle = dist.new_group(list(ranks), use_local_synchronization=True)
        return Group(axis, ranks, rank, handle)

    column = dims.group_of(rank, "pp")
    is_end = rank in (column[0], column[-1])
    ends = (column[0], column[-1]) if is_end and len(column) > 1 else (rank,)
    replicas = group("dp", dims.group_of(rank, "dp"))
    groups = Groups(
        dims=dims,
        rank=rank,
        place=place,
        world=group("world", tuple(range(dims.world_size))),
        tp=group("tp", dims.group_of(rank, "tp")),
        pp=group("pp", column),
        dp=replicas,
        ends=group("ends", ends),
        levels=tuple(map(group, LEVELS, levels)) if levels else (replicas,),
    )
    # torch names a group after its ranks and how many groups its rank has: keep that equal everywhere.
    for _ in range((not is_end) + (2 if some_have_levels and not levels else 0)):
        dist.new_group([rank], use_local_synchronization=True)
    if some_span_nodes(dims, ranks_per_node) and dist.get_backend() == "gloo":
        groups.levels[-1].add_connection()
    return groups
