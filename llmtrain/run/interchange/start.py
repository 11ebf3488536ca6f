"""What a checkpoint of step 0 says, for a run that starts from given weights."""

from __future__ import annotations

from llmtrain.config.codec import digest, to_json
from llmtrain.config.recipe import Recipe
from llmtrain.run.checkpoints.manifest import CheckpointInfo


def start_info(recipe: Recipe, run_id: str) -> CheckpointInfo:
    """Nothing consumed, no step done; the rest is what the engine compares when it loads."""
    extra = {"seed": recipe.train.seed, "learning_rate": 0.0, "model": to_json(recipe.model)}
    return CheckpointInfo(
        run_id=run_id, recipe_digest=digest(to_json(recipe)), step=0, consumed_samples=0, extra=extra
    )
