"""Where copies of every rank's snapshot go: to other nodes, and to another replica's pipeline if there is
one. Pure; the planner says what it survives, the engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.parallel_dims import ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Who keeps whose state."""

    targets: tuple[tuple[int, ...], ...]
    """[rank][copy]: the rank whose node keeps the copy."""
    in_same_pipeline: int
    """Copies that had to go to a rank of the same replica."""

    @property
    def losable_nodes(self) -> int:
        """Nodes of which any so many may be lost at once."""
        return min((len(copies) for copies in self.targets), default=0)

    def sources(self, rank: int) -> tuple[int, ...]:
        """Ranks whose copies a rank receives, ascending."""
        return tuple(other for other, copies in enumerate(self.targets) if rank in copies)


def choose_replicas(dims: ParallelDims, nodes: Sequence[Sequence[int]], copies: int) -> Replicas:
    """Give every rank `copies` targets on as many other nodes, or as many as there are.

    Copies go a fixed number of nodes further, so that every node keeps as many as it gives; of all such
    distances those come first that leave fewest copies in the replica that they are of. `nodes` holds the
    ranks of every node.
    """
    count = len(nodes)
    wanted = max(0, min(copies, count - 1))
    world = sum(len(ranks) for ranks in nodes)
    replica = [_replica(dims, rank) for rank in range(world)]
    found: list[tuple[int, int, dict[int, int]]] = []
    for distance in range(1, count):
        if sum(cost == 0 for cost, *_ in found) >= wanted:
            break  # The nearest that cost nothing are enough.
        targets = _targets(replica, nodes, distance)
        found.append((sum(replica[rank] == replica[to] for rank, to in targets.items()), distance, targets))
    chosen = sorted(found, key=lambda one: one[:2])[:wanted]
    return Replicas(
        targets=tuple(tuple(targets[rank] for *_, targets in chosen) for rank in range(world)),
        in_same_pipeline=sum(cost for cost, *_ in chosen),
    )


def _targets(
    replica: Sequence[tuple[int, int]], nodes: Sequence[Sequence[int]], distance: int
) -> dict[int, int]:
    """Rank -> rank so many nodes further: of another replica if there is one, each about equally often."""
    targets = {}
    for number, ranks in enumerate(nodes):
        there = nodes[(number + distance) % len(nodes)]
        for place, rank in enumerate(ranks):
            turned = [there[(place + turn) % len(there)] for turn in range(len(there))]
            others = (other for other in turned if replica[other] != replica[rank])
            targets[rank] = next(others, turned[0])
    return targets


def _replica(dims: ParallelDims, rank: int) -> tuple[int, int]:
    place = dims.coordinate(rank)
    return place.dp, place.cp
