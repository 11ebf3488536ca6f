"""A document as values that remember where they stand: what YAML, JSON and `--set` all become."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value; `text` is what was written."""

    value: str | int | float | bool | None
    text: str
    where: str
    base: str = ""
    """Folder that relative paths start at; empty: leave paths alone."""
    unreadable: bool = False
    """There is no value, and that has been said already."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping with text keys, in order; `keys` says where each key stands."""

    entries: dict[str, Node]
    keys: dict[str, str]
    where: str


Node = Scalar | Sequence | Table
Path = tuple[str, ...]


def from_plain(value: Any, where: str) -> Node:
    """Node of a JSON value; raises TypeError for anything that JSON cannot hold."""
    match value:
        case Mapping():
            return Table(
                entries={str(key): from_plain(entry, where) for key, entry in value.items()},
                keys=dict.fromkeys((str(key) for key in value), where),
                where=where,
            )
        case list() | tuple():
            return Sequence(tuple(from_plain(item, where) for item in value), where)
        case None | bool() | int() | float() | str():
            return Scalar(value, "null" if value is None else _text(value), where)
        case _:
            raise TypeError(f"{where}: JSON cannot hold a {type(value).__name__}")


def to_plain(node: Node) -> Any:
    """The bare value of a node."""
    match node:
        case Scalar(value=value):
            return value
        case Sequence(items=items):
            return [to_plain(item) for item in items]
        case Table(entries=entries):
            return {key: to_plain(entry) for key, entry in entries.items()}


def replace_at(table: Table, path: Path, node: Node) -> Table:
    """The table with `node` at `path`.

    Tables on the way are made where they are missing or hold something else; a number is the place of an
    entry in a list that is there.
    """
    key, rest = path[0], path[1:]
    if rest:
        below = table.entries.get(key)
        if isinstance(below, Sequence) and rest[0].isdecimal() and int(rest[0]) < len(below.items):
            numbered = Table({str(at): item for at, item in enumerate(below.items)}, {}, below.where)
            changed = replace_at(numbered, rest, node)
            entry = Sequence(tuple(changed.entries.values()), below.where)
            return Table({**table.entries, key: entry}, table.keys, table.where)
        inner = below if isinstance(below, Table) else Table({}, {}, node.where)
        node = replace_at(inner, rest, node)
    return Table(
        {**table.entries, key: node},
        {**table.keys, key: node.where if not rest else table.keys.get(key, node.where)},
        table.where,
    )


def remove_at(table: Table, path: Path) -> Table:
    """The table without what stands at `path`."""
    key, rest = path[0], path[1:]
    below = table.entries.get(key)
    if rest and isinstance(below, Table):
        return Table({**table.entries, key: remove_at(below, rest)}, table.keys, table.where)
    if rest or below is None:
        return table
    kept = {name: entry for name, entry in table.entries.items() if name != key}
    return Table(kept, {name: table.keys[name] for name in kept}, table.where)


def merge(below: Table, above: Table) -> Table:
    """Both tables; where both hold a table they are merged, else `above` wins."""
    entries = dict(below.entries)
    for key, node in above.entries.items():
        under = entries.get(key)
        entries[key] = merge(under, node) if isinstance(under, Table) and isinstance(node, Table) else node
    return Table(entries, {**below.keys, **above.keys}, above.where)


def shown(node: Node) -> str:
    """A value as it is quoted in a message: short, printable, on one line."""
    match node:
        case Scalar(value=None):
            return "nothing"
        case Scalar(text=text):
            return f"`{printable(text)}`"
        case Sequence(items=items):
            return f"a list of {len(items)}"
        case Table():
            return "a mapping"


def printable(text: str, limit: int = 60) -> str:
    """Text without control characters and not longer than `limit`."""
    clean = "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}" for character in text
    )
    return clean if len(clean) <= limit else f"{clean[: limit - 3]}..."


def _text(value: str | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    return str(value)
