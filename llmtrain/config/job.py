"""The job spec: recipe + profile + overrides, resolved, complete and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.codec import digest, to_json
from llmtrain.config.defaults import complete_recipe
from llmtrain.config.load import Loaded, read_profile, read_recipe
from llmtrain.config.reading.override import CLUSTER_PREFIX, parse_overrides, split_overrides
from llmtrain.config.recipe import Recipe
from llmtrain.config.rules.job import JOB_RULES, Pair
from llmtrain.config.rules.rule import broken
from llmtrain.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to train and where.

    `recipe.model` has no None left but `experts*` and `rope` (None: learned positions); `recipe.train.steps`
    is set; `parallel` and `batch.micro` may still hold "auto", which the plan decides.
    """

    recipe: Recipe
    """What to train."""
    cluster: ClusterProfile
    """Where to train."""
    digest: str
    """SHA-256 (first 16 hex digits) of the canonical JSON of recipe and cluster."""


def resolve(recipe_ref: str, cluster_ref: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Job spec of a recipe and a profile (shipped names or paths) with `--set` texts.

    Raises ConfigError with all problems.
    """
    recipe, cluster, problems = _read(recipe_ref, cluster_ref, overrides)
    if problems or recipe.value is None or cluster.value is None:
        raise ConfigError(problems)
    return job_spec(recipe.value, cluster.value)


def check(recipe_ref: str, cluster_ref: str, overrides: Sequence[str] = ()) -> list[Problem]:
    """Everything that `resolve` would complain about; raises nothing."""
    return _read(recipe_ref, cluster_ref, overrides)[2]


def job_spec(recipe: Recipe, cluster: ClusterProfile) -> JobSpec:
    """Job spec of values that keep to all rules; pure, and idempotent."""
    complete = complete_recipe(recipe)
    content = {"recipe": to_json(complete), "cluster": to_json(cluster)}
    return JobSpec(recipe=complete, cluster=cluster, digest=digest(content))


def _read(
    recipe_ref: str, cluster_ref: str, overrides: Sequence[str]
) -> tuple[Loaded[Recipe], Loaded[ClusterProfile], list[Problem]]:
    parsed, problems = parse_overrides(overrides)
    for_recipe, for_cluster = split_overrides(parsed)
    recipe = read_recipe(recipe_ref, for_recipe)
    cluster = read_profile(cluster_ref, for_cluster)
    problems = [*problems, *recipe.problems, *cluster.problems]
    if recipe.value is not None and cluster.value is not None:
        bad = [*recipe.bad, *((CLUSTER_PREFIX, *path) for path in cluster.bad)]
        between = broken(JOB_RULES, Pair(recipe.value, cluster.value), bad)
        problems.extend(_located(problem, recipe, cluster) for problem in between)
    return recipe, cluster, problems


def _located(problem: Problem, recipe: Loaded[Recipe], cluster: Loaded[ClusterProfile]) -> Problem:
    first, _, rest = problem.where.partition(".")
    place = cluster.where(rest) if first == CLUSTER_PREFIX else recipe.where(problem.where)
    return replace(problem, where=place)
