"""What the nodes of a run are to it, and how its ranks compare. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from llmtrain.events.records import RankState
from llmtrain.events.words import NodeStatus
from llmtrain.observe.run_reader import RunView

SLOW_RATIO = 1.2
"""A rank whose own computing takes so many times the median is shown as slow."""
FEWEST_RANKS = 2
"""Ranks that make a median worth comparing with."""


def rank_scores(ranks: Sequence[RankState]) -> dict[int, float]:
    """Median computing time over the rank's own, by rank: 1 is usual, 0.5 is half as fast. Empty for a few
    ranks, and where times are not known."""
    seconds = {rank.rank: rank.compute_seconds for rank in ranks if rank.compute_seconds}
    if len(seconds) < FEWEST_RANKS:
        return {}
    middle = median(seconds.values())
    return {rank: middle / own for rank, own in seconds.items()}


def slow_ranks(ranks: Sequence[RankState]) -> set[int]:
    """Ranks that compute much longer than the median of all."""
    return {rank for rank, score in rank_scores(ranks).items() if score * SLOW_RATIO < 1}


def node_of(view: RunView, rank: RankState) -> str:
    """Name of the node that a rank of the newest attempt runs on; its host's name where that is not known."""
    current = view.state.current
    if current is None or current.number != rank.attempt or not current.nodes or not current.world_size:
        return rank.host
    per_node = view.job.gpus_per_node or max(1, current.world_size // len(current.nodes))
    return current.nodes[min(rank.rank // per_node, len(current.nodes) - 1)]


def node_states(view: RunView) -> dict[str, NodeStatus]:
    """What every node is, by name in order of first use; a healthy one with a slow rank is slow. Nodes that
    record.json counts as lost and no event tells of are lost."""
    slow = slow_ranks(list(view.state.ranks.values()))
    with_slow = {node_of(view, rank) for rank in view.state.ranks.values() if rank.rank in slow}
    states = {name: member.status for name, member in view.state.members.items()}
    for name, status in states.items():
        if status == NodeStatus.HEALTHY and name in with_slow:
            states[name] = NodeStatus.SLOW
    for name in view.job.lost_nodes:
        in_use = view.state.current is not None and name in view.state.current.nodes
        if name not in states or (states[name] == NodeStatus.HEALTHY and not in_use):
            states[name] = NodeStatus.LOST
    return states


def node_counts(view: RunView) -> dict[str, int]:
    """How many nodes are in each state, states without any included."""
    states = list(node_states(view).values())
    return {str(status): states.count(status) for status in NodeStatus}
