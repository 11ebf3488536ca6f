"""Which nodes an attempt uses, in which layout, and how its ranks lie on them; who is in quarantine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from llmtrain.backends.base import Node
from llmtrain.config.layout import Layout
from llmtrain.errors import InfeasibleError, Problem
from llmtrain.events.watching import NodeChanged
from llmtrain.events.words import NodeStatus
from llmtrain.plan.ladder import lowest_rung
from llmtrain.plan.placement import check_rank_order, near_pipelines, rank_order, ranks_on_nodes
from llmtrain.run.job_file import JobFile
from llmtrain.run.ladder_file import Allowance, FrozenRung
from llmtrain.run.record import NodeLoss, RunRecord
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.units import plural

LONGEST_QUARANTINE = 32
"""Times the first one; it doubles with every loss of the same node."""


def choose(
    job: JobFile,
    rungs: Sequence[FrozenRung],
    nodes: Sequence[Node],
    away: Sequence[str],
    *,
    number: int,
    suspects: Mapping[str, str] | None = None,
) -> AttemptPlan:
    """The attempt on the nodes that are left: a spare for a lost one where there is one, else the rung of the
    ladder for so many nodes. Nodes that it does not use are spares.

    `suspects`: nodes with a recent conviction, and which; they are named. Raises InfeasibleError when nothing
    fits on the nodes that are left.
    """
    left = [node for node in nodes if node.name not in away]
    per_node = job.spec.cluster.gpus_per_node
    planned = len(ranks_on_nodes(job.layout, per_node))
    layout, rung = job.layout, 0
    if len(left) < planned:
        chosen = _rung_for(rungs, len(left), per_node)
        if chosen is None or chosen.layout is None:
            raise InfeasibleError([_nothing_fits(rungs, len(left), len(nodes), away)])
        layout, rung = chosen.layout, chosen.nodes
    shares = ranks_on_nodes(layout, per_node)
    used, idle = left[: len(shares)], left[len(shares) :]
    # Machines under one switch hold the stages of one pipeline.
    used = [used[place] for place in near_pipelines(layout, per_node, [node.switch for node in used])]
    check_rank_order(rank_order(layout, per_node), layout.world_size)
    plan = AttemptPlan(
        number=number,
        layout=layout,
        nodes=tuple(used),
        ranks_on_node=shares,
        rung=rung,
        idle=tuple(node.name for node in idle),
    )
    why = [_why(job, plan, [node.name for node in nodes], away), *_about_suspects(plan, suspects or {})]
    return replace(plan, membership="; ".join(part for part in why if part))


def reliable_first(nodes: Sequence[Node], suspects: Mapping[str, str]) -> tuple[Node, ...]:
    """Nodes in their order, those with a recent conviction behind all others."""
    return tuple(sorted(nodes, key=lambda node: node.name in suspects))


def fewest_nodes(job: JobFile, record: RunRecord, allowance: Allowance | None) -> int:
    """Nodes that have to be fit before a supervisor begins.

    A launch needs all that its layout uses, which is also what a scheduler is asked for; a run that has begun
    goes on with what the node-loss budget, or a person, leaves it.
    """
    cluster = job.spec.cluster
    used = len(ranks_on_nodes(job.layout, cluster.gpus_per_node))
    fewest = min(used, cluster.nodes - cluster.spares)
    if record.attempts:
        at_launch = len(record.nodes) or cluster.nodes
        fewest = min(fewest, lowest_rung(at_launch, job.spec.recipe.faults.node_loss_budget))
    return fewest if allowance is None else min(fewest, allowance.fewest_nodes)


# ---- quarantine
def with_losses(record: RunRecord, names: Iterable[str], why: str, now: float) -> RunRecord:
    """The record after nodes were lost: they count against the budget and are left out from now on."""
    known = {loss.node: loss for loss in record.losses}
    names = tuple(dict.fromkeys(names))
    for name in names:
        times = known[name].times + 1 if name in known else 1
        known[name] = NodeLoss(node=name, since=now, times=times, why=why)
    lost = tuple(dict.fromkeys((*record.lost_nodes, *names)))
    return replace(record, lost_nodes=lost, losses=tuple(known.values()))


def with_returned(record: RunRecord, names: Iterable[str]) -> RunRecord:
    """The record after nodes were taken up again; their losses go on counting."""
    back = set(names)
    losses = tuple(replace(loss, is_away=loss.is_away and loss.node not in back) for loss in record.losses)
    return replace(record, losses=losses)


def due(record: RunRecord, now: float, quarantine: float) -> tuple[str, ...]:
    """Nodes that are left out and whose quarantine is over. A loss that lies far in the future was noted
    while a clock was wrong."""
    return tuple(
        loss.node
        for loss in record.losses
        if loss.is_away and abs(now - loss.since) >= quarantine_of(loss, quarantine)
    )


def node_changes(
    told: Mapping[str, NodeStatus], record: RunRecord, now: float, quarantine: float
) -> list[NodeChanged]:
    """What to say of nodes that are left out, or not any more, against what was said of them last.

    In quarantine nobody looks at a node; one that is not back after it counts as lost.
    """
    over = due(record, now, quarantine)
    found = []
    for loss in record.losses:
        away = NodeStatus.LOST if loss.node in over else NodeStatus.QUARANTINED
        state = away if loss.is_away else NodeStatus.HEALTHY
        if told.get(loss.node, NodeStatus.HEALTHY) == state:
            continue
        end = loss.since + quarantine_of(loss, quarantine) if state is NodeStatus.QUARANTINED else None
        reason = loss.why if loss.is_away else "it is fit again"
        found.append(NodeChanged(node=loss.node, state=state, reason=reason, until=end))
    return found


def quarantine_of(loss: NodeLoss, quarantine: float) -> float:
    """Seconds for which a node is left out after its last loss: `quarantine` after a first one, doubling with
    every other."""
    return float(quarantine * min(LONGEST_QUARANTINE, 2 ** (loss.times - 1)))


# ---- words
def _rung_for(rungs: Sequence[FrozenRung], nodes: int, per_node: int) -> FrozenRung | None:
    """The highest rung that so many nodes can run."""
    fitting = [
        rung
        for rung in rungs
        if rung.nodes <= nodes
        and rung.layout is not None
        and len(ranks_on_nodes(rung.layout, per_node)) <= nodes
    ]
    return max(fitting, key=lambda rung: rung.nodes, default=None)


def _nothing_fits(rungs: Sequence[FrozenRung], left: int, known: int, away: Sequence[str]) -> Problem:
    lowest = min((rung.nodes for rung in rungs), default=0)
    below = left < lowest
    too_few = f"no layout of the ladder fits on {plural(left, 'node')}"
    why = f"the ladder ends at {plural(lowest, 'node')}" if below else too_few
    message = f"{left} of {known} nodes are left, and {why} (lost: {', '.join(away) or 'none'})"
    return Problem("nodes", message)


def _why(job: JobFile, plan: AttemptPlan, names: Sequence[str], away: Sequence[str]) -> str:
    """What is other than planned, and why; empty when nothing is."""
    gone = [name for name in away if name in names]
    lost = f"{', '.join(away)} lost" if away else "nodes are missing"
    idle = f"; idle: {', '.join(plan.idle)}" if plan.idle else ""
    if plan.rung:
        old, new = _shape(job.layout), _shape(plan.layout)
        change = f"{old} -> {new}" if old != new else f"{new} in another setting"
        split = plan.layout.micro_batches(job.spec.recipe.batch.global_size)
        return (
            f"rung of the ladder for {plan.rung} nodes, {lost}: {change}, "
            f"{_split(split)} micro-batches of {plan.layout.micro_batch} a replica{idle}"
        )
    planned = set(names[: len(plan.nodes)])
    taken = [node.name for node in plan.nodes if node.name not in planned]
    if gone and taken:
        return f"{', '.join(taken)} in place of {', '.join(gone)}, lost{idle}"
    return ""


def _about_suspects(plan: AttemptPlan, suspects: Mapping[str, str]) -> Iterator[str]:
    for name, why in suspects.items():
        if name in plan.idle:
            yield f"{name} is kept as a spare ({why})"
        elif name in [node.name for node in plan.nodes]:
            yield f"{name} is needed although it was convicted ({why})"


def _shape(layout: Layout) -> str:
    degrees = {"dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp}
    return " ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1 or axis == "dp")


def _split(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
