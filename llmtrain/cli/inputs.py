"""Files that a recipe names, looked for before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.config.load import Loaded
    from llmtrain.config.recipe import Recipe
    from llmtrain.errors import Problem

HERE = ("local",)
"""Backends whose paths are this machine's; of others they are the cluster's."""


def missing_inputs(recipe: str, overrides: Sequence[str]) -> list[Problem]:
    """Files that a recipe names and this machine has not, with file and line."""
    from llmtrain.config.load import read_recipe
    from llmtrain.config.reading.override import parse_overrides, split_overrides

    return missing_of(read_recipe(recipe, split_overrides(parse_overrides(overrides)[0])[0]))


def unfit_inputs(recipe: str, overrides: Sequence[str]) -> list[Problem]:
    """Prepared corpora of this machine that the recipe's model cannot be trained on, with file and line."""
    from llmtrain.config.load import read_recipe
    from llmtrain.config.reading.override import parse_overrides, split_overrides
    from llmtrain.corpus.corpora import unfit_corpora

    read = read_recipe(recipe, split_overrides(parse_overrides(overrides)[0])[0])
    if read.value is None:
        return []
    return [replace(problem, where=read.where(problem.where)) for problem in unfit_corpora(read.value)]


def missing_of(recipe: Loaded[Recipe]) -> list[Problem]:
    """The same of a recipe that was read; fields that are wrong already are left alone."""
    from llmtrain.corpus.given import missing_files

    if recipe.value is None or any(path[0] == "data" for path in recipe.bad):
        return []
    return [
        replace(problem, where=recipe.where(problem.where)) for problem in missing_files(recipe.value.data)
    ]
