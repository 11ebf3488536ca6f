"""`--set a.b=c`: an override is a node at a path, typed and checked exactly like the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from llmtrain.config.reading.nodes import Node, Path, Scalar, Table, printable, remove_at, replace_at
from llmtrain.config.reading.yaml_text import parse_document
from llmtrain.errors import Problem

CLUSTER_PREFIX = "cluster"
"""First part of a path that goes to the cluster profile."""

EXCLUSIVE: dict[Path, Path] = {
    ("train", "steps"): ("train", "tokens"),
    ("train", "tokens"): ("train", "steps"),
}
"""An override of the one replaces the other: a recipe gives one of them, and `--set` chooses the other."""


@dataclass(frozen=True, slots=True)
class Override:
    """One parsed `--set`."""

    path: Path
    node: Node


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """Overrides in order, and what is wrong with the texts themselves."""
    overrides: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        key, equals, value = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        # the value of a variable may be a secret that was put there by mistake
        where = f"--set {printable(f'{key}=...' if 'variables' in path else text, 80)}"
        if not equals or not all(path):
            problems.append(Problem(where, "not of the form key=value", "e.g. `--set batch.micro=2`"))
            continue
        if path == (CLUSTER_PREFIX,):
            problems.append(Problem(where, "cluster is set key by key", "e.g. `--set cluster.nodes=2`"))
            continue
        node, wrong = parse_document(value, where, base=os.fspath(FilePath.cwd()), fixed_where=where)
        problems.extend(wrong)
        if not wrong:
            overrides.append(Override(path, node if node is not None else Scalar(None, "", where)))
    return overrides, problems


def apply_overrides(table: Table, overrides: Sequence[Override]) -> Table:
    """The table with every override in place, later ones last."""
    given = {override.path for override in overrides}
    for override in overrides:
        other = EXCLUSIVE.get(override.path)
        cleared = isinstance(override.node, Scalar) and override.node.value is None
        if other is not None and other not in given and not cleared:
            table = remove_at(table, other)
        table = replace_at(table, override.path, override.node)
    return table


def without_prefix(overrides: Sequence[Override]) -> list[Override]:
    """Overrides of a cluster profile, whether written with the prefix or not."""
    return [
        Override(entry.path[1:], entry.node) if entry.path[0] == CLUSTER_PREFIX else entry
        for entry in overrides
    ]


def split_overrides(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Those of the recipe and those of the cluster profile, without the prefix."""
    recipe = [entry for entry in overrides if entry.path[0] != CLUSTER_PREFIX]
    cluster = [Override(entry.path[1:], entry.node) for entry in overrides if entry.path[0] == CLUSTER_PREFIX]
    return recipe, cluster
