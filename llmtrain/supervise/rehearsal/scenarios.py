"""What can be rehearsed: every failure with the small training that it meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llmtrain.config.cluster import ClusterProfile
from llmtrain.supervise.rehearsal import acts
from llmtrain.supervise.rehearsal.acts import Sight
from llmtrain.supervise.rehearsal.stage import Stage
from llmtrain.units import plural

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
THREE_NODES = 3
NODES = (
    f"cluster.nodes={THREE_NODES}",
    "cluster.spares=0",
    "cluster.gpus_per_node=1",
    "faults.node_loss_budget=0.4",
    "cluster.failures.restart=0",
    f"parallel.dp={THREE_NODES}",
    "parallel.tp=1",
    "parallel.pp=1",
)
"""Three nodes of one rank."""
STAND_INS = ("cluster.inter_node={data: {kind: tcp}, control: {kind: tcp}}",)
"""Nodes of this machine, whose profile may know of one only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One failure. `act` makes it happen, waits for the end, and says what was seen."""

    name: str
    does: str
    overrides: Sequence[str]
    act: Callable[[Stage], Sight]
    ranks: int = 2
    is_of_nodes: bool = False
    """Whether nodes are lost; those of a local profile are stand-ins."""
    damages_files: bool = False
    """Whether files that ranks have written are touched, so that this machine has to see them."""

    def places(self, cluster: ClusterProfile) -> tuple[str, ...]:
        """Overrides that spread the ranks over the nodes of a profile."""
        if self.is_of_nodes:
            return (*NODES, *(STAND_INS if cluster.backend.kind == "local" else ()))
        usable = max(1, cluster.nodes - cluster.spares)
        return (f"cluster.gpus_per_node={-(-self.ranks // usable)}",) if usable > 1 else ()

    def why_not(self, cluster: ClusterProfile) -> str:
        """Why it cannot be rehearsed on a cluster; empty when it can."""
        kind, usable = cluster.backend.kind, cluster.nodes - cluster.spares
        if self.is_of_nodes and kind == "slurm":
            return "a rehearsal takes no nodes away from SLURM; `--cluster local` loses stand-ins"
        if self.is_of_nodes and kind != "local" and cluster.nodes < THREE_NODES:
            return f"it takes {THREE_NODES} nodes, and the profile has {cluster.nodes}"
        if not self.is_of_nodes and usable * cluster.gpus_per_node < self.ranks:
            has = plural(usable * cluster.gpus_per_node, "accelerator")
            return f"it takes {self.ranks} accelerators, and the profile has {has}"
        if self.damages_files and cluster.storage.shared != "everywhere":
            return "checkpoints lie on the nodes (storage.shared), and this machine cannot damage them"
        return ""


SLOW_RANKS = 4


def _slow_faults() -> Iterator[str]:
    """All ranks sleep for most of a step, the victim for longer: so it shows also on a machine with other
    things to do."""
    for rank in range(SLOW_RANKS):
        yield f"{{kind: slow, step: 1, steps: 1000, rank: {rank}, seconds: 200ms}}"
    yield f"{{kind: slow, step: {acts.SLOW_FROM}, steps: 1000, rank: {acts.VICTIM}, seconds: 400ms}}"


ONE_RANK = ("parallel.dp=1", "parallel.tp=1", "parallel.pp=1")
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
        ranks=SLOW_RANKS,
    ),
    Scenario(
        name="lost-node",
        does="a node is gone; the others go on",
        overrides=("train.steps=60", "checkpoint.every_steps=5"),
        act=acts.lost_node,
        is_of_nodes=True,
    ),
    Scenario(
        name="returned-node",
        does="a lost node comes back and is taken up",
        overrides=(
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
            "train.steps=20",
            "checkpoint.every_steps=6",
            # Slow enough for the damage to be done between the save of step 12 and the death.
            "faults.inject=[{kind: slow, step: 13, steps: 4, seconds: 2s}, "
            f"{{kind: kill, step: 17, rank: {acts.VICTIM}}}]",
        ),
        act=acts.corrupt_shard,
        damages_files=True,
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
    ),
)
"""All scenarios, in the order of `all`."""
