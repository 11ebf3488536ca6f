"""Which ranks lie on which node, and which machine is which node. Pure.

Ranks are numbered pp, dp, cp, tp from slowest to fastest (`parallel_dims`), and nodes take them in order: a
tensor-parallel group lies inside a node. Stages of one pipeline are `dp x cp x tp` ranks apart, on nodes
far from each other in that order; where switches are known, machines are put into it so that the nodes of one
pipeline hang on one switch, and replicas go across.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmtrain.config.layout import Layout
from llmtrain.errors import RunError
from llmtrain.parallel_dims import AXES


def ranks_on_nodes(layout: Layout, per_node: int) -> tuple[int, ...]:
    """Ranks of each node: full nodes first, neighbours in rank stay on one node."""
    full, rest = divmod(layout.world_size, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


def rank_order(layout: Layout, per_node: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of each node by their numbers."""
    first, found = 0, []
    for count in ranks_on_nodes(layout, per_node):
        found.append(tuple(range(first, first + count)))
        first += count
    return tuple(found)


def check_rank_order(order: Sequence[Sequence[int]], world_size: int) -> None:
    """Raise RunError unless every rank has just one place."""
    seen: dict[int, int] = {}
    for node, ranks in enumerate(order):
        for rank in ranks:
            if rank in seen:
                raise RunError(f"rank {rank} is placed twice, on node {seen[rank]} and on node {node}")
            seen[rank] = node
    missing = sorted(set(range(world_size)) - seen.keys())
    foreign = sorted(seen.keys() - set(range(world_size)))
    if missing or foreign:
        what = f"rank {missing[0]} is placed nowhere" if missing else f"rank {foreign[0]} does not exist"
        raise RunError(f"{what}: {len(seen)} ranks on {len(order)} nodes, {world_size} are needed")


def near_pipelines(layout: Layout, per_node: int, switches: Sequence[str]) -> tuple[int, ...]:
    """Which machine becomes which node: of node k the place in `switches`, one name a machine.

    The machines keep their order where no switch is known, all hang on one, or a stage is not a whole number
    of nodes. Else as many pipelines as possible lie under one switch.
    """
    count, stages = len(switches), layout.pp
    unchanged = tuple(range(count))
    if stages == 1 or count % stages or layout.world_size != count * per_node or len(set(switches)) == 1:
        return unchanged
    if not all(switches):
        return unchanged
    under: dict[str, list[int]] = {}
    for machine, switch in enumerate(switches):
        under.setdefault(switch, []).append(machine)
    whole, rest = [], []
    for machines in under.values():
        fitting = len(machines) // stages * stages
        whole += machines[:fitting]
        rest += machines[fitting:]
    pipelines, wide = [*whole, *rest], count // stages
    # Node of stage p in replica part d is p * wide + d.
    return tuple(pipelines[node % wide * stages + node // wide] for node in range(count))


def placement_document(layout: Layout, per_node: int) -> dict[str, Any]:
    """What `plan.json` says of it."""
    order = rank_order(layout, per_node)
    return {
        "axes": list(AXES),
        "nodes": [{"node": node, "ranks": list(ranks)} for node, ranks in enumerate(order)],
    }
