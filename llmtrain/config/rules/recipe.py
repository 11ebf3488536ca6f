"""What must hold inside a recipe, whatever the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from llmtrain.config.defaults import complete_model
from llmtrain.config.recipe import MicroRange, Recipe
from llmtrain.config.rules.data import DATA_RULES
from llmtrain.config.rules.numerics import NUMERICS_RULES
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.errors import Problem


@rule("model.hidden", "model.heads", "model.head_dim")
def _heads_divide_hidden(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.head_dim is None and model.hidden % model.heads:
        yield Problem(
            "model.heads",
            f"model.heads = {model.heads} does not divide model.hidden = {model.hidden}",
            "choose heads that divide hidden, or give model.head_dim",
        )


@rule("model.heads", "model.kv_heads")
def _kv_heads_divide_heads(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.kv_heads is not None and model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}",
            "every key/value head serves the same number of query heads",
        )


@rule("model.kind", "model.hidden", "model.heads", "model.head_dim", "model.rope")
def _rope_needs_even_heads(recipe: Recipe) -> Iterator[Problem]:
    model = complete_model(recipe.model)
    if model.rope is not None and model.head_dim is not None and model.head_dim % 2:
        yield Problem(
            "model.head_dim" if recipe.model.head_dim else "model.heads",
            f"rotary positions turn pairs of channels, but a head is {model.head_dim} wide",
            "make model.hidden / model.heads (or model.head_dim) even",
        )


@rule("model.rope")
def _rope_scaling(recipe: Recipe) -> Iterator[Problem]:
    rope = recipe.model.rope
    if rope is None:
        return
    if rope.scaling == "none" and rope.factor != 1:
        yield Problem(
            "model.rope.factor",
            f"model.rope.factor = {rope.factor:g} has no effect without scaling",
            "set model.rope.scaling to linear or llama3",
        )
    if rope.scaling == "llama3" and rope.low_frequency_factor >= rope.high_frequency_factor:
        yield Problem(
            "model.rope.low_frequency_factor",
            f"model.rope.low_frequency_factor = {rope.low_frequency_factor:g} must be smaller than "
            f"high_frequency_factor = {rope.high_frequency_factor:g}",
        )


@rule("model.kind", "model.experts", "model.experts_per_token")
def _experts(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    for name, value in (("experts", model.experts), ("experts_per_token", model.experts_per_token)):
        if model.kind == "moe" and value is None:
            yield Problem("model.kind", f"model.kind = moe needs model.{name}", f"add `{name}` to model")
        if model.kind != "moe" and value is not None:
            yield Problem(
                f"model.{name}",
                f"model.{name} = {value} needs model.kind = moe, not {model.kind}",
                "set kind to moe",
            )
    if model.experts and model.experts_per_token and model.experts_per_token > model.experts:
        yield Problem(
            "model.experts_per_token",
            f"model.experts_per_token = {model.experts_per_token} is more than "
            f"model.experts = {model.experts}",
        )


@rule("batch.global", "batch.micro")
def _micro_divides_global(recipe: Recipe) -> Iterator[Problem]:
    batch = recipe.batch
    if isinstance(batch.micro, int) and batch.global_size % batch.micro:
        yield Problem(
            "batch.micro",
            f"batch.micro = {batch.micro} does not divide batch.global = {batch.global_size}",
            "an optimizer step is made of whole micro-batches",
        )
    if isinstance(batch.micro, MicroRange) and batch.micro.min > batch.micro.max:
        yield Problem(
            "batch.micro.min",
            f"batch.micro.min = {batch.micro.min} is more than max = {batch.micro.max}",
            "swap them",
        )
    if isinstance(batch.micro, MicroRange) and batch.micro.min > batch.global_size:
        yield Problem(
            "batch.micro.min",
            f"batch.micro.min = {batch.micro.min} is more than batch.global = {batch.global_size}",
        )


@rule("batch.global", "batch.micro", "batch.accumulation", "parallel.dp")
def _batch_product(recipe: Recipe) -> Iterator[Problem]:
    """global = micro x accumulation x dp, as far as they are fixed."""
    batch = recipe.batch
    factors = {"micro": batch.micro, "accumulation": batch.accumulation, "dp": recipe.parallel.dp}
    fixed = {name: value for name, value in factors.items() if isinstance(value, int)}
    product = prod(fixed.values())
    words = f"{' x '.join(f'{name} {value}' for name, value in fixed.items())} = {product}"
    if product > batch.global_size:
        yield Problem(
            "batch.global",
            f"batch.global = {batch.global_size} is less than {words}",
            f"set batch.global to a multiple of {product}",
        )
    elif len(fixed) == len(factors) and product != batch.global_size:
        yield Problem(
            "batch.global",
            f"batch.global = {batch.global_size} is not {words}",
            f"set batch.global to {product}, or batch.accumulation to auto",
        )
    elif "accumulation" in fixed and "dp" in fixed and batch.global_size % product:
        yield Problem(
            "batch.global",
            f"batch.global = {batch.global_size} is not a multiple of {words}",
            "set batch.accumulation to auto, or change one of them",
        )


@rule("model.kind", "model.hidden", "model.heads", "model.kv_heads", "model.ffn_hidden", "parallel.tp")
def _tensor_parallel_shapes(recipe: Recipe) -> Iterator[Problem]:
    tp = recipe.parallel.tp
    if not isinstance(tp, int):
        return
    model = complete_model(recipe.model)
    for name in ("heads", "kv_heads", "ffn_hidden"):
        size = getattr(model, name)
        if size % tp:
            yield Problem(
                "parallel.tp",
                f"parallel.tp = {tp} does not divide model.{name} = {size}",
                f"tensor parallelism cuts {name} into equal parts",
            )


@rule("model.sequence", "parallel.cp", "parallel.tp", "parallel.sequence_parallel")
def _sequence_shapes(recipe: Recipe) -> Iterator[Problem]:
    parallel, sequence = recipe.parallel, recipe.model.sequence
    if isinstance(parallel.cp, int) and parallel.cp > 1 and sequence % (2 * parallel.cp):
        yield Problem(
            "parallel.cp",
            f"2 x parallel.cp = {2 * parallel.cp} does not divide model.sequence = {sequence}",
            "a causal mask is balanced by giving each rank two pieces of the sequence",
        )
    if parallel.sequence_parallel is True and parallel.tp == 1:
        yield Problem(
            "parallel.sequence_parallel",
            "parallel.sequence_parallel = true needs parallel.tp > 1",
            "it shards along the tensor-parallel group; set it to auto or raise tp",
        )
    elif parallel.sequence_parallel is True and isinstance(parallel.tp, int) and sequence % parallel.tp:
        yield Problem(
            "parallel.tp",
            f"parallel.tp = {parallel.tp} does not divide model.sequence = {sequence}, "
            "which parallel.sequence_parallel = true needs",
        )


@rule("model.layers", "parallel.pp", "parallel.vpp", "parallel.schedule")
def _pipeline(recipe: Recipe) -> Iterator[Problem]:
    pp, vpp, schedule = recipe.parallel.pp, recipe.parallel.vpp, recipe.parallel.schedule
    chunks = prod(value for value in (pp, vpp) if isinstance(value, int))
    if chunks > recipe.model.layers:
        yield Problem(
            "parallel.pp",
            f"parallel.pp x vpp = {chunks} is more than model.layers = {recipe.model.layers}",
            "a stage holds at least one layer",
        )
    if isinstance(vpp, int) and vpp > 1 and pp == 1:
        yield Problem("parallel.vpp", f"parallel.vpp = {vpp} needs parallel.pp > 1", "set vpp to 1 or auto")
    if schedule == "1f1b" and isinstance(vpp, int) and vpp > 1:
        yield Problem(
            "parallel.schedule",
            f"parallel.schedule = 1f1b runs one chunk a stage, but parallel.vpp = {vpp}",
            "set schedule to interleaved or auto",
        )
    if schedule == "interleaved" and 1 in (vpp, pp):
        yield Problem(
            "parallel.schedule",
            "parallel.schedule = interleaved needs parallel.pp > 1 and parallel.vpp > 1",
            "set schedule to 1f1b or auto",
        )


@rule("model.kind", "model.experts", "parallel")
def _expert_parallel(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    if not isinstance(parallel.ep, int) or parallel.ep == 1:
        return
    if recipe.model.kind != "moe":
        yield Problem(
            "parallel.ep", f"parallel.ep = {parallel.ep} needs model.kind = moe", "set ep to 1 or auto"
        )
        return
    if recipe.model.experts and recipe.model.experts % parallel.ep:
        yield Problem(
            "parallel.ep",
            f"parallel.ep = {parallel.ep} does not divide model.experts = {recipe.model.experts}",
        )
    others = (parallel.dp, parallel.cp, parallel.tp)
    if all(isinstance(degree, int) for degree in others):
        ranks = prod(degree for degree in others if isinstance(degree, int))
        if ranks % parallel.ep:
            yield Problem(
                "parallel.ep", f"parallel.ep = {parallel.ep} does not divide dp x cp x tp = {ranks}"
            )


@rule("train.steps", "train.tokens")
def _one_length(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    if train.steps is None and train.tokens is None:
        yield Problem("train", "train needs steps or tokens", "e.g. `steps: 1000` or `tokens: 300B`")
    if train.steps is not None and train.tokens is not None:
        yield Problem("train.tokens", "train takes steps or tokens, not both", "remove one of the two")


RECIPE_RULES: tuple[Rule[Recipe], ...] = (
    _heads_divide_hidden,
    _kv_heads_divide_heads,
    _rope_needs_even_heads,
    _rope_scaling,
    _experts,
    *DATA_RULES,
    _micro_divides_global,
    _batch_product,
    _tensor_parallel_shapes,
    _sequence_shapes,
    _pipeline,
    _expert_parallel,
    _one_length,
    *NUMERICS_RULES,
)
