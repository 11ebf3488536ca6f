"""Fill in what a recipe leaves to its model family; pure, and idempotent."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from llmtrain.config.batch_ramp import steps_for
from llmtrain.config.model import ModelConfig, RopeConfig
from llmtrain.config.numerics import LearningRateConfig, StabilityConfig
from llmtrain.config.recipe import Recipe

FFN_MULTIPLE = 256
"""A gated feed-forward width is rounded up to this, as the Llama family does."""
SNAPSHOT_STEPS = 25
"""Steps between two memory snapshots of a run that may go back to one."""


def complete_recipe(recipe: Recipe) -> Recipe:
    """The recipe with every default filled in; `train.steps` is set and `train.tokens` is None."""
    steps = training_steps(recipe)
    return replace(
        recipe,
        model=complete_model(recipe.model),
        learning_rate=complete_learning_rate(recipe.learning_rate, steps),
        stability=complete_stability(recipe.stability),
        train=replace(recipe.train, steps=steps, tokens=None),
    )


def complete_learning_rate(rate: LearningRateConfig, steps: int) -> LearningRateConfig:
    """The learning rate of a training of so many steps, without None; a decay only where there is one."""
    decay = rate.decay_steps
    if decay is None and rate.schedule == "wsd":
        decay = max(1, steps // 10)
    return replace(
        rate,
        final=rate.peak / 10 if rate.final is None else rate.final,
        decay_steps=decay,
    )


def complete_stability(stability: StabilityConfig) -> StabilityConfig:
    """The section without None."""
    if stability.snapshot_every is not None:
        return stability
    return replace(stability, snapshot_every=SNAPSHOT_STEPS if stability.spikes.action == "rewind" else 0)


def complete_model(model: ModelConfig) -> ModelConfig:
    """The model without None, but for `experts*` (dense models) and `rope` (learned positions)."""
    gpt = model.kind == "gpt"
    bias = gpt if model.bias is None else model.bias
    return replace(
        model,
        kv_heads=model.kv_heads or model.heads,
        head_dim=model.head_dim or model.hidden // model.heads,
        ffn_hidden=model.ffn_hidden or default_ffn_hidden(model),
        norm=model.norm or ("layernorm" if gpt else "rmsnorm"),
        activation=model.activation or ("gelu" if gpt else "swiglu"),
        bias=bias,
        qkv_bias=bias if model.qkv_bias is None else model.qkv_bias,
        rope=model.rope if gpt else model.rope or RopeConfig(),
        tie_embeddings=gpt if model.tie_embeddings is None else model.tie_embeddings,
    )


def default_ffn_hidden(model: ModelConfig) -> int:
    """4 x hidden for gpt; 8/3 x hidden, rounded up, for the gated families: the same number of parameters."""
    if model.kind == "gpt":
        return 4 * model.hidden
    return -(-8 * model.hidden // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def training_steps(recipe: Recipe) -> int:
    """Optimizer steps; tokens are rounded up to whole steps."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    samples = ceil((recipe.train.tokens or 0) / recipe.model.sequence)
    return steps_for(recipe.batch.ramp, recipe.batch.global_size, samples)
