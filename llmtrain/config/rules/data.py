"""What must hold inside a recipe's `data`."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config.data import DataConfig
from llmtrain.config.recipe import Recipe
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.errors import Problem

MOST_CORPORA = 255
SMALLEST_SHARE = 1e-4
"""A corpus of a blend below this share is read too seldom to matter, and is a slip more often than a wish."""


@rule("model.vocab", "data.tokenizer")
def _vocab_covers_bytes(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.tokenizer == "bytes" and recipe.model.vocab < 256:
        yield Problem(
            "model.vocab",
            f"model.vocab = {recipe.model.vocab} is less than the 256 tokens of data.tokenizer = bytes",
            "set vocab to 256 or more",
        )


@rule("data")
def _data_is_named(recipe: Recipe) -> Iterator[Problem]:
    for field, name in (*recipe.data.corpora(), ("data.tokenizer", recipe.data.tokenizer)):
        if not name.strip():
            yield Problem(field, f"{field} is empty", "name a path, or remove the key")


@rule("data")
def _blend(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if not data.blend:
        return
    if data.corpus != DataConfig().corpus:
        hint = f"remove data.corpus, or make it an entry: `- {{corpus: {data.corpus}, weight: 1}}`"
        yield Problem("data.corpus", "data takes one corpus or a blend, not both", hint)
    if len(data.blend) > MOST_CORPORA:
        yield Problem("data.blend", f"data.blend has {len(data.blend)} corpora, more than {MOST_CORPORA}")
    first: dict[str, int] = {}
    total = sum(part.weight for part in data.blend)
    for index, part in enumerate(data.blend):
        place = f"data.blend.{index}"
        if first.setdefault(part.corpus, index) != index:
            hint = f"give entry {first[part.corpus]} the sum of the weights"
            yield Problem(f"{place}.corpus", f"{part.corpus} is in data.blend twice", hint)
        if part.weight < SMALLEST_SHARE * total:
            hint = f"the smallest share is {SMALLEST_SHARE:g} of the sum of all weights"
            yield Problem(
                f"{place}.weight", f"{place}.weight = {part.weight:g} is next to nothing of {total:g}", hint
            )


DATA_RULES: tuple[Rule[Recipe], ...] = (_vocab_covers_bytes, _data_is_named, _blend)
