"""Recipes and cluster profiles from files: nodes, overrides, types, rules, and the place of each problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.huggingface import expand_from
from llmtrain.config.reading.build import Builder
from llmtrain.config.reading.document import read_table
from llmtrain.config.reading.nodes import Node, Table
from llmtrain.config.reading.nodes import Path as KeyPath
from llmtrain.config.reading.nodes import Sequence as Items
from llmtrain.config.reading.override import Override, apply_overrides, parse_overrides
from llmtrain.config.recipe import Recipe
from llmtrain.config.rules.cluster import CLUSTER_RULES
from llmtrain.config.rules.recipe import RECIPE_RULES
from llmtrain.config.rules.rule import Rule, broken
from llmtrain.errors import ConfigError, LlmtrainError, Problem
from llmtrain.resources import Kind, find

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What a file became. `value` may hold unusable fields (`bad`).

    It is None when there was nothing to build from.
    """

    value: T | None
    problems: list[Problem] = field(default_factory=list)
    bad: frozenset[KeyPath] = frozenset()
    root: Table = field(default_factory=lambda: Table({}, {}, ""))

    def where(self, dotted: str) -> str:
        """Place of a field; of the nearest section around it when the field is not written."""
        node: Node = self.root
        place = self.root.where
        for key in dotted.split(".") if dotted else ():
            if isinstance(node, Items) and key.isdecimal() and int(key) < len(node.items):
                node = node.items[int(key)]
                place = node.where
                continue
            if not isinstance(node, Table) or key not in node.entries:
                break
            place, node = node.keys[key], node.entries[key]
        return place


def load_recipe(reference: str, overrides: Sequence[str] = ()) -> Recipe:
    """Recipe of a shipped name or a path; raises ConfigError with all problems."""
    parsed, problems = parse_overrides(overrides)
    return usable(read_recipe(reference, parsed), problems)


def load_profile(reference: str, overrides: Sequence[str] = ()) -> ClusterProfile:
    """Cluster profile of a shipped name or a path; raises ConfigError with all problems.

    Overrides have no `cluster.`.
    """
    parsed, problems = parse_overrides(overrides)
    return usable(read_profile(reference, parsed), problems)


def read_recipe(reference: str, overrides: Sequence[Override] = ()) -> Loaded[Recipe]:
    """Recipe with its problems; raises nothing."""
    table, problems = _table("recipes", reference, overrides)
    if table is None:
        return Loaded(None, problems)
    model = table.entries.get("model")
    wrong: list[Problem] = []
    if isinstance(model, Table):
        expanded, wrong = expand_from(model)
        table = Table({**table.entries, "model": expanded}, table.keys, table.where)
    unread = frozenset({("model",)}) if wrong else frozenset()
    return _checked(table, Recipe, RECIPE_RULES, Builder([*problems, *wrong], set(unread), unread=unread))


def read_profile(reference: str, overrides: Sequence[Override] = ()) -> Loaded[ClusterProfile]:
    """Cluster profile with its problems; raises nothing."""
    table, problems = _table("cluster_profiles", reference, overrides)
    if table is None:
        return Loaded(None, problems)
    return _checked(table, ClusterProfile, CLUSTER_RULES, Builder(problems))


def usable(loaded: Loaded[T], problems: Sequence[Problem] = ()) -> T:
    """The value; raises ConfigError when anything is wrong."""
    found = [*problems, *loaded.problems]
    if found or loaded.value is None:
        raise ConfigError(found)
    return loaded.value


def located(problems: Sequence[Problem], loaded: Loaded[T]) -> list[Problem]:
    """Problems of rules with file and line instead of the dotted path."""
    return [replace(problem, where=loaded.where(problem.where)) for problem in problems]


def _table(kind: Kind, reference: str, overrides: Sequence[Override]) -> tuple[Table | None, list[Problem]]:
    """What a file holds, with the overrides in place."""
    try:
        path = find(kind, reference)
    except LlmtrainError as error:
        return None, list(error.problems)
    table, problems = read_table(kind, path)
    return None if table is None else apply_overrides(table, overrides), problems


def _checked(table: Table, cls: type[T], rules: Sequence[Rule[T]], builder: Builder) -> Loaded[T]:
    """Dataclass of a table with the problems of its fields and of the rules."""
    value: T = builder.section(cls, table)
    loaded = Loaded(value, builder.problems, frozenset(builder.bad), table)
    loaded.problems.extend(located(broken(rules, value, loaded.bad), loaded))
    loaded.problems.sort(key=_place)
    return loaded


def _place(problem: Problem) -> tuple[bool, int]:
    """Order of problems: those of the file by line, then those of overrides."""
    line = problem.where.rpartition(":")[2]
    return problem.where.startswith("--set"), int(line) if line.isdecimal() and line.isascii() else 0
