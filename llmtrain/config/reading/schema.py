"""What a frozen dataclass may hold, read from its annotations; shared by YAML, `--set` and JSON."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from llmtrain.config.fields import Bounds, Pattern, RelativeTo, Unit, Verbatim
from llmtrain.config.recipe import YAML_NAMES

NO_BOUNDS = Bounds()


@dataclass(frozen=True, slots=True)
class ScalarType:
    """Text, number or boolean with its rules."""

    python: type
    unit: Unit | None = None
    bounds: Bounds = NO_BOUNDS
    pattern: Pattern | None = None
    verbatim: bool = False
    path: RelativeTo | None = None


@dataclass(frozen=True, slots=True)
class ChoiceType:
    """One of a few values; `enum` is the class they belong to, if any."""

    values: tuple[Any, ...]
    enum: type[Enum] | None = None


@dataclass(frozen=True, slots=True)
class SectionType:
    """A nested dataclass."""

    cls: type


@dataclass(frozen=True, slots=True)
class ListType:
    """A tuple of any length."""

    item: FieldType


@dataclass(frozen=True, slots=True)
class MapType:
    """Free names to values."""

    value: FieldType


@dataclass(frozen=True, slots=True)
class UnionType:
    """One of several types, None among them or not."""

    members: tuple[FieldType, ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class AnyType:
    """Whatever JSON can hold."""


FieldType = ScalarType | ChoiceType | SectionType | ListType | MapType | UnionType | AnyType


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field: Python name, key in files, type."""

    name: str
    key: str
    type: FieldType
    required: bool


@cache
def fields_of(cls: type) -> tuple[FieldSpec, ...]:
    """Fields of a dataclass in order; raises TypeError for an annotation that files cannot express."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        FieldSpec(
            name=entry.name,
            key=YAML_NAMES.get(entry.name, entry.name),
            type=type_of(hints[entry.name]),
            required=entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING,
        )
        for entry in dataclasses.fields(cls)
        if entry.init
    )


def type_of(annotation: Any, extras: tuple[Any, ...] = ()) -> FieldType:
    """Field type of an annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(arguments[0], (*arguments[1:], *extras))
    if origin in {Union, types.UnionType}:
        return _union(
            [type_of(member) for member in arguments if member is not type(None)], type(None) in arguments
        )
    if origin is Literal:
        return ChoiceType(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return ListType(type_of(arguments[0]))
    if origin is list:
        return ListType(type_of(arguments[0]))
    if origin is dict:
        return MapType(type_of(arguments[1]))
    if annotation is Any:
        return AnyType()
    if isinstance(annotation, type):
        return _plain(annotation, extras)
    raise TypeError(f"no file can hold a {annotation!r}")


def describe(kind: FieldType) -> str:
    """What is allowed, in words that fit after "must be"."""
    match kind:
        case ScalarType():
            return _describe_scalar(kind)
        case ChoiceType(values):
            words = [_word(value) for value in values]
            return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
        case SectionType(cls):
            return f"a mapping with the keys {', '.join(entry.key for entry in fields_of(cls))}"
        case ListType(item):
            return f"a list, each entry {describe(item)}"
        case MapType():
            return "a mapping"
        case UnionType(members):
            return " or ".join(describe(member) for member in members)
        case AnyType():
            return "any value"


def choices(kind: FieldType) -> Iterator[str]:
    """Words that a field takes, for suggestions."""
    match kind:
        case ChoiceType(values):
            yield from (_word(value) for value in values)
        case UnionType(members):
            for member in members:
                yield from choices(member)
        case _:
            return


def _plain(annotation: type, extras: tuple[Any, ...]) -> FieldType:
    if dataclasses.is_dataclass(annotation):
        return SectionType(annotation)
    if issubclass(annotation, Enum):
        return ChoiceType(tuple(member.value for member in annotation), annotation)
    if annotation in {str, int, float, bool, Path}:
        return _scalar(annotation, extras)
    raise TypeError(f"no file can hold a {annotation!r}")


def _scalar(python: type, extras: tuple[Any, ...]) -> ScalarType:
    found: dict[str, Any] = {}
    for extra in extras:
        match extra:
            case Unit():
                found["unit"] = extra
            case Bounds():
                found["bounds"] = extra
            case Pattern():
                found["pattern"] = extra
            case Verbatim():
                found["verbatim"] = True
            case RelativeTo():
                found["path"] = extra
    return ScalarType(python, **found)


def _union(members: list[FieldType], optional: bool) -> FieldType:
    return UnionType(tuple(members), optional)


def _describe_scalar(kind: ScalarType) -> str:
    noun, example = _UNIT_WORDS[kind.unit.kind] if kind.unit is not None else (_NOUNS[kind.python], "")
    if kind.pattern is not None:
        return f"{noun} of {kind.pattern.words}"
    return " ".join(part for part in (noun, _limits(kind), example) if part)


def _limits(kind: ScalarType) -> str:
    bounds = kind.bounds
    parts = []
    if bounds.low is not None and not (kind.unit is not None and bounds.low == 0):
        parts.append(f"{'>' if bounds.open_low else '>='} {_limit(kind, bounds.low)}")
    if bounds.high is not None and bounds.high < 2**53:
        parts.append(f"{'<' if bounds.open_high else '<='} {_limit(kind, bounds.high)}")
    return " and ".join(parts)


def _limit(kind: ScalarType, value: float) -> str:
    """A bound in the field's own unit."""
    from llmtrain import units

    printers = {"bytes": units.format_bytes, "bandwidth": units.format_bandwidth, "flops": units.format_flops}
    printer = printers.get(kind.unit.kind) if kind.unit is not None else None
    return printer(value) if printer is not None else f"{value:.16g}"


_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}

_UNIT_WORDS = {
    "bytes": ("a size", "such as `80 GB`"),
    "bandwidth": ("a bandwidth", "such as `50 GB/s` or `400 Gb/s`"),
    "duration": ("a duration", "such as `90s`, `30m` or `24:00:00`"),
    "count": ("a whole number", "such as `500`, `1e6` or `300B`"),
    "flops": ("a rate", "such as `312 TFLOP/s`"),
}


def _word(value: Any) -> str:
    """A choice as it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
