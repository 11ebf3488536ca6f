"""What the nodes, ranks and attempts of a run are to it, in the words of all views, and how ranks compare.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from llmtrain.events.records import AttemptState, RankState, RankStatus
from llmtrain.events.words import NodeStatus
from llmtrain.observe.run_reader import RunView

SLOW_RATIO = 1.2
"""A rank whose own computing takes so many times the median is shown as slow."""
FEWEST_RANKS = 2
"""Ranks that make a median worth comparing with."""
MOST_WAITING = 4096
"""Most ranks that are shown before they were heard of."""


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


def rank_word(view: RunView, rank: RankState) -> str:
    """One word for a rank: alive, waiting (not heard of yet), ended with its attempt, or how it ended itself;
    unknown while nobody supervises the run."""
    if rank.status not in (RankStatus.STARTING, RankStatus.RUNNING):
        return str(rank.status)
    current = view.state.current
    if view.state.ended or current is None or current.outcome:
        return "ended"
    if not view.is_supervised:
        return "unknown"
    return "alive" if rank.last_seen else "waiting"


def known_ranks(view: RunView) -> list[RankState]:
    """All ranks that the newest attempt shall have, also those that were not heard of yet, in order."""
    state, current = view.state, view.state.current
    world_size = current.world_size if current is not None and current.number == state.attempt else 0
    nodes = current.nodes if current is not None else ()
    per_node = max(1, world_size // len(nodes)) if nodes else 1
    waiting = {
        rank: RankState(rank=rank, attempt=state.attempt, host=nodes[rank // per_node] if nodes else "")
        for rank in range(min(world_size, MOST_WAITING))
        if rank not in state.ranks and rank // per_node < max(1, len(nodes))
    }
    known = {**waiting, **state.ranks}
    return [known[rank] for rank in sorted(known)]


def attempt_word(view: RunView, attempt: AttemptState) -> str:
    """How an attempt ended, `running`, or `abandoned` when nobody saw its end."""
    goes_on = attempt is view.state.current and view.state.ended is None and view.is_supervised
    return attempt.outcome or ("running" if goes_on else "abandoned")
