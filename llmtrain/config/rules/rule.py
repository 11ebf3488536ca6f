"""A rule: a small function that yields what is wrong, and the fields whose values it needs.

`where` of a Problem made by a rule is the dotted path of the field (`model.heads`); the loader turns it into
file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from llmtrain.config.reading.nodes import Path
from llmtrain.errors import Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """`check` is asked only when every path in `needs` (and all below it) has a usable value."""

    needs: tuple[Path, ...]
    check: Callable[[T], Iterator[Problem]]


def rule(*needs: str) -> Callable[[Callable[[T], Iterator[Problem]]], Rule[T]]:
    """Make a rule of a function; `needs` are dotted paths."""

    def decorate(check: Callable[[T], Iterator[Problem]]) -> Rule[T]:
        return Rule(tuple(tuple(need.split(".")) for need in needs), check)

    return decorate


def broken(rules: Sequence[Rule[T]], value: T, bad: Iterable[Path] = ()) -> list[Problem]:
    """Problems of all rules whose needs are usable."""
    unusable = tuple(bad)
    return [
        problem
        for entry in rules
        if not any(_overlaps(need, path) for need in entry.needs for path in unusable)
        for problem in entry.check(value)
    ]


def _overlaps(need: Path, path: Path) -> bool:
    """Whether one path is the other or leads to it."""
    shorter = min(len(need), len(path))
    return need[:shorter] == path[:shorter]
