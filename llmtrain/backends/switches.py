"""Which switch each node hangs on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmtrain.backends.base import Node
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.hosts import expand_hosts


def profile_switches(cluster: ClusterProfile) -> dict[str, tuple[str, ...]]:
    """Leaf switch -> its nodes, as the profile says; {} when it says nothing."""
    switches = cluster.inter_node.switches if cluster.inter_node else {}
    return {
        switch: tuple(host.name for host in expand_hosts(entries, "")[0])
        for switch, entries in switches.items()
    }


def with_switches(nodes: Sequence[Node], switches: Mapping[str, Sequence[str]]) -> list[Node]:
    """Nodes that know their switch, in their order; machines under one switch are not brought together."""
    known = {name: switch for switch, names in switches.items() for name in names}
    return [replace(node, switch=known.get(node.name, "")) for node in nodes]
