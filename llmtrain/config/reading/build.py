"""Nodes to dataclasses: every value checked against its field, every problem collected with its place."""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from llmtrain import units
from llmtrain.config.reading.nearest import SYNONYMS, nearest
from llmtrain.config.reading.nodes import Node, Path, Scalar, Sequence, Table, printable, shown, to_plain
from llmtrain.config.reading.schema import (
    AnyType,
    ChoiceType,
    FieldSpec,
    FieldType,
    ListType,
    MapType,
    ScalarType,
    SectionType,
    UnionType,
    choices,
    describe,
    fields_of,
)
from llmtrain.config.recipe import EXTRA_KEYS
from llmtrain.errors import Problem

INVALID: Any = object()
"""Stands in a half-built dataclass for a field whose path is in `Builder.bad`."""


def dotted(path: Path) -> str:
    """`batch.micro` of a path."""
    return ".".join(path)


@dataclass(slots=True)
class Builder:
    """Builds one document. `bad` holds the paths that have no usable value; rules on them make no sense."""

    problems: list[Problem] = field(default_factory=list)
    bad: set[Path] = field(default_factory=set)
    unread: frozenset[Path] = frozenset()
    """Sections whose source could not be read; what they lack is no problem of its own."""
    finite: bool = True
    """Refuse infinities and NaN; JSON of results may hold them."""

    def section(self, cls: type, table: Table, path: Path = ()) -> Any:
        """Instance of a dataclass; fields with problems hold INVALID."""
        specs = fields_of(cls)
        extra = EXTRA_KEYS.get(cls.__name__, ())
        guessed = self._unknown_keys(table, specs, path, extra)
        values: dict[str, Any] = {}
        for spec in specs:
            place = (*path, spec.key)
            node = table.entries.get(spec.key)
            if node is not None:
                values[spec.name] = self.value(spec.type, node, place)
            elif spec.key in guessed:
                self.bad.add(place)
                if spec.required:
                    values[spec.name] = INVALID
            elif spec.required:
                self._missing(spec, table, place, quiet=path in self.unread or bool(guessed & set(extra)))
                values[spec.name] = INVALID
        return cls(**values)

    def value(self, kind: FieldType, node: Node, path: Path) -> Any:
        """Value of a node for a field type, or INVALID."""
        match kind, node:
            case _, Scalar(unreadable=True):
                self.bad.add(path)
                return INVALID
            case AnyType(), _:
                return to_plain(node)
            case UnionType(optional=True), Scalar(value=None):
                return None
            case UnionType(), _:
                return self._union(kind, node, path)
            case _:
                return self._single(kind, node, path)

    def _single(self, kind: FieldType, node: Node, path: Path) -> Any:
        """Value of a node for a type that is no union."""
        match kind, node:
            case SectionType(cls), Table():
                return self.section(cls, node, path)
            case SectionType(cls), Scalar(value=None, where=where):
                return self.section(cls, Table({}, {}, where), path)
            case ListType(item), Sequence(items=items):
                return tuple(
                    self.value(item, entry, (*path, str(index))) for index, entry in enumerate(items)
                )
            case MapType(item), Table(entries=entries):
                return {key: self.value(item, entry, (*path, key)) for key, entry in entries.items()}
            case ChoiceType(), Scalar():
                return self._choice(kind, node, path)
            case ScalarType(), Scalar():
                return self._scalar(kind, node, path)
            case _:
                return self._wrong(kind, node, path)

    def _unknown_keys(
        self, table: Table, specs: tuple[FieldSpec, ...], path: Path, extra: tuple[str, ...]
    ) -> set[str]:
        """Report keys that no field has; return the keys that were probably meant."""
        allowed = [*extra, *(spec.key for spec in specs)]
        meant: set[str] = set()
        for key in table.entries:
            if key in allowed:
                continue
            guess = nearest(key, allowed)
            elsewhere = None if guess == key or path else _in_a_section(key, specs)
            if guess is not None and elsewhere is None:
                meant.add(guess)
            inside = f" in {dotted(path)}" if path else ""
            suggestion = f"did you mean `{elsewhere or guess}`? " if elsewhere or guess else ""
            hint = "write the keys out" if key == "<<" else f"{suggestion}allowed: {', '.join(allowed)}"
            self.problems.append(Problem(table.keys[key], f"unknown key `{printable(key)}`{inside}", hint))
        return meant

    def _missing(self, spec: FieldSpec, table: Table, path: Path, *, quiet: bool) -> None:
        self.bad.add(path)
        if quiet:
            return
        self.problems.append(
            Problem(table.where, f"missing key `{dotted(path)}`", f"it must be {describe(spec.type)}")
        )

    def _union(self, kind: UnionType, node: Node, path: Path) -> Any:
        """The member that fits the node's shape.

        A scalar goes to the choice that has it, else to the type that can.
        """
        if isinstance(node, Scalar) and node.value is not None:
            fitting = [member for member in kind.members if _accepts(member, node)]
        else:
            shape = (SectionType, MapType) if isinstance(node, Table) else (ListType,)
            fitting = [member for member in kind.members if isinstance(member, shape)]
        if fitting:
            return self.value(fitting[0], node, path)
        return self._wrong(kind, node, path)

    def _choice(self, kind: ChoiceType, node: Scalar, path: Path) -> Any:
        for value in kind.values:
            if value == node.value and type(value) is type(node.value):
                return kind.enum(value) if kind.enum is not None else value
        return self._wrong(kind, node, path)

    def _scalar(self, kind: ScalarType, node: Scalar, path: Path) -> Any:
        if kind.verbatim and node.value is not None:
            fits = kind.pattern is None or re.fullmatch(kind.pattern.regex, node.text)
            return node.text if fits else self._wrong(kind, node, path)
        if (
            kind.unit is not None
            and isinstance(node.value, str | int | float)
            and not isinstance(node.value, bool)
        ):
            return self._quantity(kind, node, path)
        value = _converted(kind, node)
        if value is INVALID or (isinstance(value, float) and self.finite and not math.isfinite(value)):
            return self._wrong(kind, node, path)
        if isinstance(value, int | float) and not isinstance(value, bool) and not kind.bounds.holds(value):
            return self._wrong(kind, node, path)
        if kind.pattern is not None and not re.fullmatch(kind.pattern.regex, str(value)):
            return self._wrong(kind, node, path)
        return value

    def _quantity(self, kind: ScalarType, node: Scalar, path: Path) -> Any:
        assert kind.unit is not None
        try:
            value = self._measured(kind.unit.kind, node)
        except units.UnitError as error:
            return self._wrong(kind, node, path, printable(str(error), 160))
        except ValueError:
            return self._wrong(kind, node, path)
        if math.isnan(value) or not kind.bounds.holds(value):
            return self._wrong(kind, node, path)
        return kind.python(value)

    def _measured(self, unit: str, node: Scalar) -> float:
        """Number of a quantity in its base unit; raises ValueError."""
        if isinstance(node.value, int | float) and unit != "count":
            return _finite_float(node.value)
        return _PARSERS[unit](node.value if isinstance(node.value, str | int | float) else node.text)

    def _wrong(self, kind: FieldType, node: Node, path: Path, hint: str = "") -> Any:
        close = nearest(node.text, list(choices(kind))) if isinstance(node, Scalar) else None
        hint = hint or (f"did you mean `{close}`?" if close is not None else _hint(kind, node))
        return self._fail(
            node.where, path, f"{dotted(path)} must be {describe(kind)}, not {shown(node)}", hint
        )

    def _fail(self, where: str, path: Path, message: str, hint: str) -> Any:
        self.bad.add(path)
        self.problems.append(Problem(where, message, hint))
        return INVALID


_NEEDS_UNIT = frozenset({"bytes", "bandwidth", "flops"})


def _in_a_section(key: str, specs: tuple[FieldSpec, ...]) -> str | None:
    """`model.hidden` of `hidden`: a key that belongs one level deeper."""
    for spec in specs:
        if isinstance(spec.type, SectionType):
            below = [entry.key for entry in fields_of(spec.type.cls)]
            if key in below or SYNONYMS.get(key) in below:
                return f"{spec.key}.{key if key in below else SYNONYMS[key]}"
    return None


def _accepts(kind: FieldType, node: Scalar) -> bool:
    """Whether a scalar has the right shape for a type; its rules are checked later."""
    match kind:
        case ChoiceType(values):
            return any(value == node.value and type(value) is type(node.value) for value in values)
        case ScalarType(python=python) if python in {str, FilePath}:
            return isinstance(node.value, str)
        case ScalarType(unit=unit) if unit is not None:
            return not isinstance(node.value, bool) and any(character.isdigit() for character in node.text)
        case ScalarType(python=python):
            number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
            return number if python in {int, float} else isinstance(node.value, bool)
        case UnionType(members):
            return any(_accepts(member, node) for member in members)
        case AnyType():
            return True
        case _:
            return False


def _converted(kind: ScalarType, node: Scalar) -> Any:
    """Scalar as the field's Python type, or INVALID."""
    value = node.value
    if kind.python is float and isinstance(value, int) and not isinstance(value, bool):
        number = _finite_float(value)
        return INVALID if math.isnan(number) else number
    if kind.python is FilePath and isinstance(value, str):
        return FilePath(value)
    if type(value) is not kind.python:
        return INVALID
    if kind.path is not None and isinstance(value, str):
        return _anchored(value, kind.path.keywords, node.base)
    return value


def _finite_float(value: float) -> float:
    """The number as a float; NaN, which no bounds hold, when it has no finite one."""
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _anchored(text: str, keywords: tuple[str, ...], base: str) -> str:
    """A path made absolute from the folder of the file that says it; words and empty text stay."""
    if not base or not text or text in keywords:
        return text
    # Unlike pathlib's it takes a `~` of nobody as a name, which then is not there.
    return os.path.normpath(FilePath(base, os.path.expanduser(text)))  # noqa: PTH111


def _hint(kind: FieldType, node: Node) -> str:
    """What to type, for the mix-ups that YAML invites."""
    if isinstance(node, Scalar) and isinstance(kind, ScalarType):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            return "it must be finite"
        if kind.unit is not None and kind.unit.kind in _NEEDS_UNIT and isinstance(node.value, int | float):
            return "give it a unit"
        if kind.python is str and node.value is None and _may_be_empty(kind):
            return 'for an empty text write ""'
        if kind.python is str and isinstance(node.value, bool | int | float):
            return f'put it in quotes: "{printable(node.text)}"'
        if kind.python is bool and node.text.lower() in {"yes", "no", "on", "off", "y", "n"}:
            return f"write {'true' if node.text.lower() in {'yes', 'on', 'y'} else 'false'}"
        if kind.python in {int, float} and isinstance(node.value, str) and _number_in_quotes(node.text):
            return f"write it without quotes or separators: {_number_in_quotes(node.text)}"
    return ""


def _may_be_empty(kind: ScalarType) -> bool:
    return kind.pattern is None or re.fullmatch(kind.pattern.regex, "") is not None


def _number_in_quotes(text: str) -> str:
    bare = text.strip().replace("_", "").replace(",", "")
    return bare if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?", bare) else ""


_PARSERS: dict[str, Callable[[units.Quantity], float]] = {
    "bytes": units.parse_bytes,
    "bandwidth": units.parse_bandwidth,
    "duration": units.parse_duration,
    "count": units.parse_count,
    "flops": units.parse_flops,
}
