"""Which replicas share a node. Pure."""

from __future__ import annotations

from llmtrain.parallel_dims import ParallelDims


def node_levels(
    replicas: tuple[int, ...], rank: int, ranks_per_node: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The replicas on a rank's node, and those at its place on all nodes; None where the replicas lie on one
    node, or on each node alone, or not evenly."""
    if not ranks_per_node:
        return None
    by_node: dict[int, list[int]] = {}
    for other in replicas:
        by_node.setdefault(other // ranks_per_node, []).append(other)
    inside = by_node[rank // ranks_per_node]
    if len(by_node) == 1 or len(inside) == 1 or len({len(ranks) for ranks in by_node.values()}) > 1:
        return None
    place = inside.index(rank)
    return tuple(inside), tuple(ranks[place] for ranks in by_node.values())


def some_span_nodes(dims: ParallelDims, ranks_per_node: int) -> bool:
    """Whether the replicas of some rank lie on several nodes."""
    if not ranks_per_node:
        return False
    return any(len({rank // ranks_per_node for rank in ranks}) > 1 for ranks in dims.groups("dp"))
