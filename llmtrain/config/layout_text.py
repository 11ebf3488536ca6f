"""`--layout dp=8,tp=8,pp=4`: one layout as text."""

from __future__ import annotations

from typing import Any

from llmtrain.config.layout import Layout
from llmtrain.config.reading.build import Builder
from llmtrain.config.reading.nodes import Node, Scalar, Table, printable
from llmtrain.config.reading.yaml_text import resolve_scalar
from llmtrain.config.recipe import Recipe
from llmtrain.errors import ConfigError, Problem

FLAG = "--layout"


def parse_layout(text: str, recipe: Recipe | None = None) -> Layout:
    """Layout of `key=value,key=value`; raises ConfigError with all problems.

    What the text leaves out is taken from the recipe where that fixes it, else it is the smallest setting;
    `vpp` above 1 means the interleaved schedule.
    """
    entries, problems = _entries(text)
    builder = Builder(problems)
    defaults = _fixed(recipe) if recipe is not None else {}
    given = {**defaults, **entries}
    if "vpp" in entries and "schedule" not in entries and entries["vpp"] != _scalar("1"):
        given["schedule"] = _scalar("interleaved")
    table = Table(given, dict.fromkeys(given, FLAG), FLAG)
    layout: Layout = builder.section(Layout, table)
    if not builder.problems and layout.dp * layout.cp * layout.tp % layout.ep:
        ranks = layout.dp * layout.cp * layout.tp
        problems.append(Problem(FLAG, f"ep = {layout.ep} does not divide dp x cp x tp = {ranks}"))
    if builder.problems:
        raise ConfigError(builder.problems)
    return layout


def _entries(text: str) -> tuple[dict[str, Node], list[Problem]]:
    entries: dict[str, Node] = {}
    problems: list[Problem] = []
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            hint = "e.g. `--layout dp=8,tp=8,pp=4,micro_batch=2`"
            problems.append(Problem(FLAG, f"`{printable(part)}` is not of the form key=value", hint))
        elif key in entries:
            problems.append(Problem(FLAG, f"`{printable(key)}` is given twice", "keep one of the two"))
        else:
            entries[key] = _scalar(value)
    return entries, problems


def _fixed(recipe: Recipe) -> dict[str, Node]:
    """What a recipe fixes, by the keys of a layout."""
    keys = ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "sequence_parallel", "schedule", "recompute")
    values: dict[str, Any] = {key: getattr(recipe.parallel, key) for key in keys}
    values["micro_batch"] = recipe.batch.micro if isinstance(recipe.batch.micro, int) else "auto"
    return {key: _scalar(str(value).lower()) for key, value in values.items() if value != "auto"}


def _scalar(text: str) -> Scalar:
    return Scalar(resolve_scalar(text), text, FLAG)
