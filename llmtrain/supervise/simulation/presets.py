"""Scenarios: published runs, and any recipe on any profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmtrain import __version__
from llmtrain.config.job import JobSpec, resolve
from llmtrain.config.layout import Layout
from llmtrain.plan.plan import Plan
from llmtrain.plan.reliability import STATE_BYTES, spares_needed
from llmtrain.run.job_file import JobFile
from llmtrain.supervise.decision.allowance import frozen
from llmtrain.supervise.simulation.model import Durations, Scenario, rungs_by_replicas
from llmtrain.supervise.simulation.trace import Kind, Rates
from llmtrain.units import DAY

HOST_COPY = 1e10
"""Bytes/s of a node for the copy into host memory that the training waits for."""
COMMON = (
    "start 60 s: MegaScale connects more than 10,000 GPUs in less than 30 s; processes wait in standby",
    "tear-down 2 s and a person's resume 1 h after exit code 93",
    "a save stalls the training for the copy into host memory (10 GB/s a node, at least 1 s)",
    "nodes fail independently and evenly; repairs last exponentially long",
)
SHARES_BY_DEFAULT: Mapping[Kind, float] = {"rank": 0.45, "node": 0.5, "hang": 0.05}


def durations(parameters: float, nodes: int, write: float, load: float, step: float) -> Durations:
    """What follows from the size of the state; `write` and `load` in bytes/s of all storage."""
    state = STATE_BYTES * parameters
    stall = max(1.0, state / nodes / HOST_COPY)
    return Durations(step=step, load=5.0 + state / load, stall=stall, write=5.0 + state / write)


def llama3(days: float | None = None) -> Scenario:
    """Llama 3 405B: 466 interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""
    return published(
        "llama3",
        layout=Layout(dp=128, tp=8, pp=16),
        batch=2048,
        # GPUs 30.1 % and their memory 17.2 % of the interruptions take the node away.
        rates=Rates(
            interruptions_per_day=466 / 54,
            shares={"rank": 0.477, "node": 0.473, "hang": 0.05},
            repair=DAY,
        ),
        days=days or 54.0,
        took=durations(405e9, 2048, 2e12, 2e12, 10.0),
        assumptions=(
            "466 interruptions in 54 days on 2,048 nodes of 8; 47.3 % take the node away for a day (GPU and "
            "HBM faults as published), 5 % are hangs, the rest is cured by a restart",
            "storage 2 TB/s sustained, as published",
        ),
    )


def opt(days: float | None = None) -> Scenario:
    """OPT-175B: two nodes lost a day on 124 nodes of 8 (the metaseq chronicles)."""
    return published(
        "opt",
        layout=Layout(dp=124, tp=8, pp=1),
        batch=1024,
        rates=Rates(
            interruptions_per_day=2.0,
            shares={"rank": 0.0, "node": 1.0, "hang": 0.0},
            repair=DAY / 2,
        ),
        days=days or 60.0,
        took=durations(175e9, 124, 5e10, 5e10, 15.0),
        assumptions=("two nodes lost a day, each back after half a day", "storage 50 GB/s"),
    )


PRESETS: Mapping[str, Callable[[float | None], Scenario]] = {"llama3": llama3, "opt": opt}


def from_plan(spec: JobSpec, plan: Plan, days: float) -> Scenario:
    """A recipe on a profile, with the profile's failure rate and the plan's layout, ladder and step time."""
    cluster, best = spec.cluster, plan.plans[0]
    failures = cluster.failures
    took = durations(
        plan.model.parameters,
        cluster.nodes,
        cluster.storage.bandwidth,
        cluster.storage.bandwidth,
        best.predicted.step_seconds,
    )
    return Scenario(
        name=spec.recipe.name,
        job=JobFile(run_id=spec.recipe.name, version=__version__, spec=spec, layout=best.layout),
        rungs=frozen(plan),
        nodes=cluster.nodes,
        spares=cluster.spares,
        seconds=days * DAY,
        rates=Rates(
            interruptions_per_day=cluster.nodes * DAY / failures.node_mtbf,
            shares=SHARES_BY_DEFAULT,
            repair=failures.repair,
        ),
        durations=took,
        node_mtbf=failures.node_mtbf,
        assumptions=(
            f"failures.node_mtbf of the profile for each of {cluster.nodes} nodes; half of the failures take "
            "the node away for failures.repair, 5 % are hangs, the rest is cured by a restart",
            *COMMON,
        ),
    )


def published(
    name: str,
    *,
    layout: Layout,
    batch: int,
    rates: Rates,
    days: float,
    took: Durations,
    assumptions: tuple[str, ...],
) -> Scenario:
    """A run on nodes of eight GPUs that fail as `rates` say, for `days`, with the spares that its plan would
    have."""
    used = layout.world_size // 8
    spares = spares_needed(rates.interruptions_per_day * rates.shares["node"] * rates.repair / DAY)
    nodes = used + spares
    spec = resolve("llama-70b", "h100-32x8", [f"cluster.nodes={nodes}", f"batch.global={batch}"])
    budget = spec.recipe.faults.node_loss_budget
    return Scenario(
        name=name,
        job=JobFile(run_id=name, version=__version__, spec=spec, layout=layout),
        rungs=rungs_by_replicas(layout, nodes, 8, budget, batch),
        nodes=nodes,
        spares=spares,
        seconds=days * DAY,
        rates=rates,
        durations=took,
        node_mtbf=used * DAY / rates.interruptions_per_day,
        assumptions=(*assumptions, f"{spares} spares, as the plan has them for 95 of 100 days", *COMMON),
    )
