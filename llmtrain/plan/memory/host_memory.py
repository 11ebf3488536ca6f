"""What saves and snapshots take of a node's host memory, and what losses the memory tier survives."""

from __future__ import annotations

from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.config.layout import Layout
from llmtrain.errors import Problem
from llmtrain.plan.memory.replicas import Replicas, choose_replicas
from llmtrain.plan.placement import rank_order
from llmtrain.units import plural

GENERATIONS = 2
"""Snapshots that lie in shared memory while a new one is made: it, and the one before."""


def host_copies(checkpoint: CheckpointConfig, copies: int) -> int:
    """Copies of the states of a node's ranks that lie in its host memory at once.

    One that is being written to disk; one to compare with, where checkpoints may be incremental; and with the
    memory tier one that is on its way there, and all that lies there: each node keeps as many copies of
    others' states as it gives.
    """
    to_disk = 2 if checkpoint.incremental and checkpoint.every else 1
    if checkpoint.memory.every_steps is None:
        return to_disk
    return to_disk + 1 + GENERATIONS * (1 + copies)


def replicas_of(checkpoint: CheckpointConfig, layout: Layout, per_node: int) -> Replicas:
    """Who keeps whose state."""
    return choose_replicas(layout.dims, rank_order(layout, per_node), checkpoint.memory.copies)


def survives(checkpoint: CheckpointConfig, layout: Layout, per_node: int) -> str:
    """What may fail without a way back to the disk, in words."""
    every = checkpoint.memory.every_steps
    if every is None:
        return "the memory tier is off: after every failure the newest checkpoint on disk is read"
    found = replicas_of(checkpoint, layout, per_node)
    lost = found.losable_nodes
    if not lost:
        why = "the run has one node" if layout.world_size <= per_node else "copies: 0"
        text = f"failed processes cost at most {every} steps and what a snapshot takes; a lost node ({why})"
        return f"{text} costs all since the checkpoint on disk"
    text = f"failed processes, and any {plural(lost, 'lost node')} at once, cost at most {every} steps"
    if found.in_same_pipeline:
        text += f"; {found.in_same_pipeline} of {layout.world_size * lost} copies lie in their own replica"
    if lost < checkpoint.memory.copies:
        text += f"; there are no nodes for more than {lost} copies of each state"
    return text


def too_few_nodes(checkpoint: CheckpointConfig, layout: Layout, per_node: int) -> Problem | None:
    """Copies that are asked for and have no node to lie on."""
    wanted = checkpoint.memory.copies
    if checkpoint.memory.every_steps is None or not wanted:
        return None
    kept = replicas_of(checkpoint, layout, per_node).losable_nodes
    if kept >= wanted:
        return None
    nodes = plural(-(-layout.world_size // per_node), "node")
    return Problem(
        "checkpoint.memory.copies",
        f"{wanted} on other nodes asked for, but a run on {nodes} can keep {kept}",
        f"use more nodes, or set it to {kept}",
    )
