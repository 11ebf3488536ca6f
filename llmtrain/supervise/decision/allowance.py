"""A person's word that a run may go on with fewer nodes than its node-loss budget leaves it."""

from __future__ import annotations

from llmtrain.errors import InfeasibleError, Problem, RunError, UsageError
from llmtrain.plan.make import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.run.job_file import JobFile
from llmtrain.run.ladder_file import Allowance, FrozenRung, write_allowance
from llmtrain.run.layout import RunDir
from llmtrain.units import plural


def allow_fewer(run: RunDir, job: JobFile, nodes: int) -> Allowance:
    """Extend the ladder of a run down to so many nodes, and write that down; returns what was written.

    Raises UsageError for a number that the cluster has not, InfeasibleError when nothing fits on so few
    nodes, RunError when the file system refuses.
    """
    known = job.spec.cluster.nodes
    if not 1 <= nodes <= known:
        raise UsageError(
            f"--nodes {nodes}: the run has {plural(known, 'node')}", hint=f"give a number from 1 to {known}"
        )
    plan = make_plan(job.spec, lowest=nodes)
    last = plan.ladder[-1]
    if last.candidate is None:
        fitting = [rung.nodes for rung in plan.ladder if rung.candidate is not None]
        hint = f"{min(fitting)} nodes are the fewest that something fits on" if fitting else ""
        raise InfeasibleError([Problem("--nodes", f"nothing fits on {plural(nodes, 'node')}", hint)])
    allowance = Allowance(fewest_nodes=nodes, ladder=frozen(plan))
    try:
        write_allowance(run, allowance)
    except OSError as error:
        raise RunError(f"cannot be written: {error.strerror}", where=str(run.allowance_json)) from error
    return allowance


def frozen(plan: Plan) -> tuple[FrozenRung, ...]:
    """The ladder of a plan as a run keeps it."""
    return tuple(
        FrozenRung(
            nodes=rung.nodes,
            layout=rung.candidate.layout if rung.candidate else None,
            micro_batches=rung.micro_batches,
        )
        for rung in plan.ladder
    )
