"""What must hold between a recipe and a cluster profile.

Paths of the profile start with `cluster.`, as in `--set`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.recipe import Recipe
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.errors import Problem
from llmtrain.units import plural


@dataclass(frozen=True, slots=True)
class Pair:
    """A recipe on a cluster."""

    recipe: Recipe
    cluster: ClusterProfile


@rule("parallel.tp", "cluster.gpus_per_node")
def _tensor_parallel_inside_a_node(pair: Pair) -> Iterator[Problem]:
    tp, gpus = pair.recipe.parallel.tp, pair.cluster.gpus_per_node
    if not isinstance(tp, int):
        return
    if tp > gpus:
        yield Problem(
            "parallel.tp",
            f"parallel.tp = {tp} is more than the {gpus} ranks of a node of `{pair.cluster.name}`",
            "tensor parallelism stays inside a node",
        )
    elif gpus % tp:
        yield Problem(
            "parallel.tp",
            f"parallel.tp = {tp} does not divide the {gpus} ranks of a node of `{pair.cluster.name}`",
            "a tensor-parallel group would reach over two nodes",
        )


@rule("parallel", "cluster.nodes", "cluster.gpus_per_node", "cluster.spares")
def _degrees_fit_the_cluster(pair: Pair) -> Iterator[Problem]:
    parallel, cluster = pair.recipe.parallel, pair.cluster
    degrees = {name: getattr(parallel, name) for name in ("dp", "tp", "pp", "cp")}
    fixed = {name: value for name, value in degrees.items() if isinstance(value, int)}
    if cluster.spares >= cluster.nodes or not fixed:
        return
    ranks = (cluster.nodes - cluster.spares) * cluster.gpus_per_node
    product = prod(fixed.values())
    if product > ranks:
        words = " x ".join(f"{name} {value}" for name, value in fixed.items())
        spare = f", {cluster.spares} of them spare" if cluster.spares else ""
        first = next(iter(fixed))
        yield Problem(
            f"parallel.{first}",
            f"{words} = {product} ranks, but `{cluster.name}` has {ranks} "
            f"({plural(cluster.nodes, 'node')} of {cluster.gpus_per_node}{spare})",
            "lower a degree, set one to auto, or use more nodes",
        )


@rule("precision.mode", "cluster.accelerator")
def _precision_exists(pair: Pair) -> Iterator[Problem]:
    mode, name = pair.recipe.precision.mode, pair.cluster.accelerator
    if mode != "fp8" or not isinstance(name, str):
        return
    from llmtrain.hardware import ACCELERATORS

    accelerator = ACCELERATORS.get(name)
    if accelerator is not None and not accelerator.fp8_flops:
        yield Problem(
            "precision.mode", f"precision.mode = fp8, but {accelerator.title} has no FP8", "use bf16"
        )


JOB_RULES: tuple[Rule[Pair], ...] = (
    _tensor_parallel_inside_a_node,
    _degrees_fit_the_cluster,
    _precision_exists,
)
