"""Seconds of collective operations: rings in a node, and rings over nodes that share the nodes' ports.

A ring moves 2(n-1)/n of the bytes for an all-reduce and half of that for a reduce-scatter or an all-gather
(of the whole tensor), in as many steps; each step costs a hop. Rank order is tensor parallel first, so that
neighbouring groups lie side by side in each node and share what the node can send.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.plan.machine import LinkSpeed, Machine

_SHARED_PORTS = 0.77
"""Share of the ports' bandwidth that is left when several rings of a node compete for them."""


_TREE = 6.9
"""Hops a doubling of the ranks adds once a library leaves rings for trees, where hops would only add up; it
does so for an all-reduce only."""


@dataclass(frozen=True, slots=True)
class Group:
    """Where the ranks of one communication group lie."""

    size: int
    per_node: int
    """Members in one node."""
    rings: int
    """Groups of the same kind that share a node's ports."""


def group(machine: Machine, size: int, stride: int) -> Group:
    """Place a group of `size` ranks that are `stride` apart in rank order."""
    node = machine.gpus_per_node
    if size * stride <= node:
        return Group(size, size, 1)
    per_node = max(1, node // stride)
    return Group(size, min(per_node, size), min(stride, node))


def shards(machine: Machine, replicas: int, stride: int) -> int:
    """Over how many of its replicas ZeRO spreads the states; they are `stride` apart in rank order."""
    if not machine.software.shard_within_node:
        return replicas
    return min(replicas, max(1, machine.gpus_per_node // stride))


def ring_seconds(machine: Machine, where: Group, moved: float, passes: int, calls: float = 1.0) -> float:
    """Seconds of a ring over `moved` bytes in `calls` pieces; `passes`: 2 for an all-reduce, 1 for half of
    it.
    """
    size = where.size
    if size <= 1 or moved <= 0:
        return 0.0
    steps = passes * (size - 1)
    share = passes * (size - 1) / size * moved
    intra = machine.intra
    if where.per_node >= size:
        return calls * (intra.latency + steps * intra.hop) + share / (intra.bus * _fewer_peers(size))
    inter = _inter(machine)
    bus = min(intra.bus, inter.bus / where.rings * (_SHARED_PORTS if where.rings > 1 else 1.0))
    node_steps = passes * (-(-size // where.per_node) - 1)
    hops = (steps - node_steps) * intra.hop + node_steps * inter.hop
    if passes == 2:
        hops = min(hops, _TREE * passes * (size - 1).bit_length() * inter.hop)
    return calls * (inter.latency + hops) + share / bus


def _fewer_peers(size: int) -> float:
    """Two or four accelerators reach less of an NVSwitch's bandwidth than eight (measured on A100)."""
    return {2: 0.84, 3: 0.92, 4: 0.95}.get(size, 1.0)


def _inter(machine: Machine) -> LinkSpeed:
    return machine.inter if machine.inter is not None else machine.intra


def all_reduce(machine: Machine, where: Group, moved: float, calls: float = 1.0) -> float:
    """Seconds to sum `moved` bytes over a group, in `calls` pieces."""
    return ring_seconds(machine, where, moved, 2, calls)


def scatter_or_gather(machine: Machine, where: Group, moved: float, calls: float = 1.0) -> float:
    """Seconds to reduce-scatter or all-gather `moved` bytes in whole, in `calls` pieces."""
    return ring_seconds(machine, where, moved, 1, calls)


def all_to_all(machine: Machine, where: Group, moved: float) -> float:
    """Seconds until each rank has sent `moved` bytes, spread over the group's members."""
    size = where.size
    if size <= 1 or moved <= 0:
        return 0.0
    leaving = moved * (size - 1) / size
    intra = machine.intra
    if where.per_node >= size:
        return intra.latency + leaving / (0.75 * intra.bus)
    inter = _inter(machine)
    outside = moved * (size - where.per_node) / size
    per_rank = inter.bus / machine.gpus_per_node
    return inter.latency + max(outside / (0.8 * per_rank), leaving / (0.75 * intra.bus))


def send(machine: Machine, moved: float, stride: int, stages: int) -> float:
    """Seconds to hand `moved` bytes to the next pipeline stage, `stride` ranks away, while all ranks of a
    node do.
    """
    if stride * stages <= machine.gpus_per_node:
        return machine.intra.latency + moved / machine.intra.bus
    inter = _inter(machine)
    leaving = min(stride, machine.gpus_per_node)
    return inter.latency + moved / min(machine.intra.bus, inter.bus / leaving)
