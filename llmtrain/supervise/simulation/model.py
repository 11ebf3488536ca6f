"""What is simulated: a cluster, a plan, and how long things take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmtrain.config.layout import Layout
from llmtrain.plan.ladder import lowest_rung
from llmtrain.run.job_file import JobFile
from llmtrain.run.ladder_file import FrozenRung
from llmtrain.supervise.attempts.step_up import relative_time
from llmtrain.supervise.simulation.trace import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Assumed durations, seconds. The detection of failures is not assumed: the real detectors take it."""

    step: float = 10.0
    """A step in the planned layout."""
    tear_down: float = 2.0
    """From a finding to no process left."""
    start: float = 60.0
    """From there to connected ranks with a model."""
    load: float = 10.0
    """Reading a checkpoint."""
    stall: float = 1.0
    """That the training waits for a save."""
    write: float = 30.0
    """From a save's beginning to its commit."""
    mend: float = 4 * 3600.0
    """From when a node is named as slow to when a person has mended it; it is slow until then."""
    resume: float = 3600.0
    """For a person to resume a run that ended with exit code 93, once nodes are fit again."""

    @property
    def restart(self) -> float:
        """From leaving an attempt in order to the first step of the next one."""
        return self.write + self.tear_down + self.start + self.load


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run to simulate."""

    name: str
    job: JobFile
    rungs: Sequence[FrozenRung]
    nodes: int
    """Spares included."""
    spares: int
    seconds: float
    rates: Rates
    durations: Durations
    node_mtbf: float
    """The profile's."""
    assumptions: tuple[str, ...] = ()
    """For people: where the numbers come from."""

    def speed(self, layout: Layout) -> float:
        """Of a layout against the planned one."""
        return 1.0 / relative_time(layout, self.job.layout, self.job.spec.recipe.batch.global_size)


def rungs_by_replicas(
    layout: Layout, nodes: int, per_node: int, budget: float, batch: int
) -> tuple[FrozenRung, ...]:
    """A ladder that drops whole replicas, as the planner's does while nothing else fits better."""
    found = []
    in_a_replica = layout.world_size // layout.dp
    for count in range(nodes, lowest_rung(nodes, budget) - 1, -1):
        replicas = min(layout.dp, count * per_node // in_a_replica)
        rung = replace(layout, dp=replicas) if replicas else None
        split = rung.micro_batches(batch) if rung else ()
        found.append(FrozenRung(nodes=count, layout=rung, micro_batches=split))
    return tuple(found)
