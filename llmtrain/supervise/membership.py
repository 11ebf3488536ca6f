"""Which nodes an attempt uses, and how its ranks lie on them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.backends.base import Node
from llmtrain.config.layout import Layout
from llmtrain.errors import InfeasibleError, Problem
from llmtrain.run.job_file import JobFile
from llmtrain.supervise.attempt import AttemptPlan


def choose(job: JobFile, nodes: Sequence[Node], lost: Sequence[str], *, number: int) -> AttemptPlan:
    """The attempt on the first nodes that are left; the others are spares.

    Raises InfeasibleError when too few are left for the layout.
    """
    left = [node for node in nodes if node.name not in lost]
    shares = ranks_on_nodes(job.layout, job.spec.cluster.gpus_per_node)
    if len(left) < len(shares):
        message = f"the layout needs {len(shares)} nodes, and {len(left)} of {len(nodes)} are left"
        raise InfeasibleError([Problem("nodes", message, f"lost: {', '.join(lost)}")])
    return AttemptPlan(
        number=number, layout=job.layout, nodes=tuple(left[: len(shares)]), ranks_on_node=shares
    )


def ranks_on_nodes(layout: Layout, per_node: int) -> tuple[int, ...]:
    """Ranks of each node: full nodes first, neighbours in rank stay on one node."""
    full, rest = divmod(layout.world_size, per_node)
    return (per_node,) * full + ((rest,) if rest else ())
