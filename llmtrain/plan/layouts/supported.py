"""What the training engine refuses, with the field, the reason and what to type instead: asked before a
launch and again by every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.layout import Layout
from llmtrain.config.model import ModelConfig
from llmtrain.config.recipe import Recipe
from llmtrain.errors import ConfigError, Problem
from llmtrain.plan.layouts.engine_features import OWN_ENGINE

TRAINED_MODES = ("bf16", "fp16", "tf32", "fp32")
"""Precision modes that the engine runs."""


def check_supported(recipe: Recipe, layout: Layout) -> None:
    """Raise ConfigError with everything about a job that the engine cannot run."""
    problems = [*_model_problems(recipe.model), *_layout_problems(recipe.model, layout)]
    problems += _replica_problems(recipe, layout)
    problems += _compile_problems(recipe, layout)
    if recipe.precision.mode not in TRAINED_MODES:
        problems.append(
            Problem(
                "precision.mode",
                f"{recipe.precision.mode} is planned but not trained",
                f"use one of {', '.join(TRAINED_MODES)}",
            )
        )
    problems += _batch_problems(recipe, layout)
    if problems:
        raise ConfigError(problems)


def _batch_problems(recipe: Recipe, layout: Layout) -> Iterator[Problem]:
    """Every size of a batch that grows must be whole micro-batches for every replica."""
    for size in recipe.batch.sizes:
        try:
            layout.micro_batches(size)
        except ValueError as error:
            place = "batch" if size == recipe.batch.global_size else "batch.ramp"
            yield Problem(place, str(error) if place == "batch" else f"at {size} sequences, {error}")
            return


def _compile_problems(recipe: Recipe, layout: Layout) -> Iterator[Problem]:
    """Collectives inside of layers, weight gradients put off and tensors made again are Python code of the
    engine, which a compiler cannot look into."""
    if not recipe.train.compile:
        return
    for setting, is_so in (
        (f"tp={layout.tp}", layout.tp > 1),
        ("schedule=zero-bubble", layout.schedule == "zero-bubble" and layout.pp > 1),
        ("recompute=selective", layout.recompute == "selective"),
    ):
        if is_so:
            yield Problem(
                "train.compile", f"layers are not compiled with {setting}", "set train.compile to false"
            )


def _model_problems(model: ModelConfig) -> Iterator[Problem]:
    if model.kind == "moe" or (model.experts or 1) > 1:
        yield Problem(
            "model.kind", "mixture-of-experts models are planned but not trained", "use gpt or llama"
        )
    for name in (
        "kv_heads",
        "head_dim",
        "ffn_hidden",
        "norm",
        "activation",
        "qkv_bias",
        "bias",
        "tie_embeddings",
    ):
        if getattr(model, name) is None:
            yield Problem(f"model.{name}", "is not resolved; job.json must hold a complete model")
    if model.rope is not None and (model.head_dim or 0) % 2:
        yield Problem("model.head_dim", f"rotary positions need an even head width, not {model.head_dim}")


def _replica_problems(recipe: Recipe, layout: Layout) -> Iterator[Problem]:
    communication = recipe.parallel.gradient_communication
    if layout.zero == 0 and layout.dp > 1 and communication != "fp32":
        yield Problem(
            "parallel.gradient_communication",
            f"{communication} needs sharded states: zero=0 brings every gradient back to every replica",
            "set parallel.zero to 1",
        )
    totals = [size // layout.micro_batch for size in recipe.batch.sizes]
    uneven = next((total for total in totals if total % layout.dp), None)
    if layout.zero == 3 and uneven is not None:
        yield Problem(
            "parallel.zero",
            f"zero=3 gathers weights in every micro-batch, so all replicas need as many: dp={layout.dp} does "
            f"not divide {uneven}",
            "set parallel.zero to 2, or choose a dp or batch.micro that fits",
        )


def _layout_problems(model: ModelConfig, layout: Layout) -> Iterator[Problem]:
    for setting in OWN_ENGINE.missing(layout):
        yield Problem(f"parallel.{setting.split('=')[0]}", f"the engine does not run {setting}")
    if layout.pp == 1 and layout.vpp > 1:
        yield Problem("parallel.vpp", f"vpp={layout.vpp} needs a pipeline", "set parallel.pp above 1")
    if layout.pp * layout.vpp > model.layers:
        yield Problem(
            "parallel.pp",
            f"pp={layout.pp} x vpp={layout.vpp} stages are more than {model.layers} layers",
            f"set parallel.pp to at most {model.layers}",
        )
    divided = {
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "ffn_hidden": model.ffn_hidden or layout.tp,
    }
    for name, count in divided.items():
        if count % layout.tp:
            yield Problem(
                "parallel.tp",
                f"tp={layout.tp} does not divide model.{name}={count}",
                f"set parallel.tp to a divisor of {count}",
            )
    if model.vocab < 8 * layout.tp:
        yield Problem("parallel.tp", f"tp={layout.tp} is too much for a vocabulary of {model.vocab}")
    if layout.sequence_parallel and model.sequence % layout.tp:
        yield Problem(
            "parallel.sequence_parallel", f"tp={layout.tp} does not divide model.sequence={model.sequence}"
        )
