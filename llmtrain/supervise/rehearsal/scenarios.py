"""What can be rehearsed: every failure with the small training that it meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llmtrain.supervise.rehearsal import acts
from llmtrain.supervise.rehearsal.acts import Sight
from llmtrain.supervise.rehearsal.stage import Stage

SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.sequence=64",
    "batch.global=12",
    "batch.micro=1",
    "data.validation_every=0",
    "learning_rate.warmup_steps=2",
    "checkpoint.every=0",
    "faults.standby=false",
)
"""Turns the recipe `tiny` into one whose steps take milliseconds."""
NODES = (
    "cluster.nodes=3",
    "cluster.gpus_per_node=1",
    "cluster.inter_node={data: {kind: tcp}, control: {kind: tcp}}",
    "faults.node_loss_budget=0.4",
    "cluster.failures.restart=0",
    "parallel.dp=3",
    "parallel.tp=1",
    "parallel.pp=1",
)
"""Three nodes of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One failure. `act` makes it happen, waits for the end, and says what was seen."""

    name: str
    does: str
    overrides: Sequence[str]
    act: Callable[[Stage], Sight]
    is_of_nodes: bool = False
    """Whether nodes are lost; on one machine only, where they are stand-ins."""
    needs_local: bool = False
    """Whether files or processes of the ranks are touched."""


SLOW_RANKS = 4


def _slow_faults() -> Iterator[str]:
    """All ranks sleep for most of a step, the victim for longer: so it shows also on a machine with other
    things to do."""
    for rank in range(SLOW_RANKS):
        yield f"{{kind: slow, step: 1, steps: 1000, rank: {rank}, seconds: 200ms}}"
    yield f"{{kind: slow, step: {acts.SLOW_FROM}, steps: 1000, rank: {acts.VICTIM}, seconds: 400ms}}"


TWO_REPLICAS = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1")
FOUR_REPLICAS = (f"parallel.dp={SLOW_RANKS}", "parallel.tp=1", "parallel.pp=1")
SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        name="death",
        does="a rank is killed",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=16",
            "checkpoint.every_steps=5",
            f"faults.inject=[{{kind: kill, step: 8, rank: {acts.VICTIM}}}]",
        ),
        act=acts.death,
    ),
    Scenario(
        name="hang",
        does="a rank does nothing any more",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=32",
            "checkpoint.every_steps=5",
            f"faults.inject=[{{kind: hang, step: 26, rank: {acts.VICTIM}}}]",
        ),
        act=acts.hang,
    ),
    Scenario(
        name="slow",
        does="a rank computes longer than the others",
        overrides=(
            *FOUR_REPLICAS,
            "train.steps=100",
            "checkpoint.every_steps=100",
            f"faults.inject=[{', '.join(_slow_faults())}]",
        ),
        act=acts.slow,
    ),
    Scenario(
        name="lost-node",
        does="a node is gone; the others go on",
        overrides=(*NODES, "train.steps=60", "checkpoint.every_steps=5"),
        act=acts.lost_node,
        is_of_nodes=True,
    ),
    Scenario(
        name="returned-node",
        does="a lost node comes back and is taken up",
        overrides=(
            *NODES,
            "train.steps=150",
            "checkpoint.every_steps=10",
            # Slow enough to be still at it when the node is back.
            "faults.inject=[{kind: slow, step: 20, steps: 60, seconds: 200ms}]",
        ),
        act=acts.returned_node,
        is_of_nodes=True,
    ),
    Scenario(
        name="full-disk",
        does="saves find no room for a while",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=30",
            "checkpoint.every_steps=5",
            f"faults.inject=[{{kind: full_disk, step: 8, steps: 10, rank: {acts.VICTIM}}}]",
        ),
        act=acts.full_disk,
    ),
    Scenario(
        name="corrupt-shard",
        does="the newest checkpoint is damaged, and then needed",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=24",
            "checkpoint.every_steps=6",
            "faults.inject=[{kind: slow, step: 14, steps: 4, seconds: 2s}]",
        ),
        act=acts.corrupt_shard,
        needs_local=True,
    ),
    Scenario(
        name="preemption",
        does="the scheduler wants the nodes back; the run is resumed",
        overrides=(
            *TWO_REPLICAS,
            "train.steps=40",
            "checkpoint.every_steps=100",
            "faults.inject=[{kind: slow, step: 11, steps: 3, seconds: 1s}]",
        ),
        act=acts.preemption,
        needs_local=True,
    ),
)
"""All scenarios, in the order of `all`."""
