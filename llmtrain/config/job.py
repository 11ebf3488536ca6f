"""The job spec: recipe + profile + overrides, resolved, complete and frozen."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to train and where. `recipe.model` has no None left but `experts*` and `rope` (None: learned positions);
    `recipe.train.steps` is set; `parallel` and `batch.micro` may still hold "auto", which the plan decides."""

    recipe: Recipe
    """What to train."""
    cluster: ClusterProfile
    """Where to train."""
    digest: str
    """SHA-256 (first 16 hex digits) of the canonical JSON of recipe and cluster."""
