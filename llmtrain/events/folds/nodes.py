"""Nodes: the health samples of the newest attempt's, and what every node of the run is to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from llmtrain.events import schema
from llmtrain.events.event import Event
from llmtrain.events.folds.reducer import Reducer
from llmtrain.events.records import Member, NodeState
from llmtrain.events.run_state import RunState
from llmtrain.events.watching import NodeChanged
from llmtrain.events.words import NodeStatus

MEMBERS = 16384
"""Most ranks, and most nodes, that are kept."""


def with_started_nodes(state: RunState, event: Event, payload: schema.AttemptStarted) -> RunState:
    """The state after an attempt began: nodes that it uses are healthy, idle ones spare; the others stay what
    they were."""
    used = (_member(name, NodeStatus.HEALTHY, event) for name in payload.nodes)
    idle = (_member(name, NodeStatus.SPARE, event) for name in payload.idle)
    return replace(state, members=_with_members(state.members, [*used, *idle]))


def _member(name: str, status: NodeStatus, event: Event) -> Member:
    return Member(node=name, status=status, attempt=event.attempt, since=event.time)


def _with_members(members: Mapping[str, Member], changed: Iterable[Member]) -> Mapping[str, Member]:
    """The newer word on a node counts, whatever the order in which files are read."""
    known = dict(members)
    for member in changed:
        before = known.get(member.node)
        is_newer = before is None or (before.attempt, before.since) <= (member.attempt, member.since)
        if is_newer and (before is not None or len(known) < MEMBERS):
            known[member.node] = member
    return known


def _node_changed(state: RunState, event: Event, payload: NodeChanged) -> RunState:
    if payload.state not in tuple(NodeStatus):
        return state
    member = replace(_member(payload.node, payload.state, event), reason=payload.reason, until=payload.until)
    return replace(state, members=_with_members(state.members, [member]))


def _node_sample(state: RunState, event: Event, payload: schema.NodeSample) -> RunState:
    if event.attempt != state.attempt or (payload.node not in state.nodes and len(state.nodes) >= MEMBERS):
        return state
    sample = NodeState(
        node=payload.node,
        attempt=event.attempt,
        host=payload.host,
        time=event.time,
        cpu_percent=payload.cpu_percent,
        memory_used=payload.memory_used,
        memory_total=payload.memory_total,
        ranks_alive=payload.ranks_alive,
    )
    return replace(state, nodes={**state.nodes, payload.node: sample})


REDUCERS: dict[str, Reducer] = {
    schema.NodeSample.kind: _node_sample,
    NodeChanged.kind: _node_changed,
}
