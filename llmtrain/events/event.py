"""One event: the envelope, its payload, and the one line of JSON that holds both.

Numbers that are not finite are written as the strings "nan", "inf" and "-inf", so that every line is strict
JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from llmtrain.events import reactions, saving, schema, watching
from llmtrain.events.schema import SCHEMA_VERSION, Payload
from llmtrain.events.words import Source

LINE_LIMIT = 1 << 20
"""Longest line, in bytes, that a reader accepts; longer ones are skipped."""

NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Envelope and typed payload of one line."""

    time: float
    """Epoch seconds at the writer's clock."""
    run: str
    attempt: int
    source: Source
    rank: int | None
    seq: int
    """Counts the events of one writer from 0; a gap means dropped events."""
    payload: Payload
    version: int = SCHEMA_VERSION

    @property
    def kind(self) -> str:
        """The word that names the payload's class."""
        return self.payload.kind


@cache
def payload_classes() -> dict[str, type[Payload]]:
    """Every kind of event that this version knows."""
    defined = (*vars(schema).values(), *vars(reactions).values(), *vars(saving).values())
    defined = (*defined, *vars(watching).values())
    found = (value for value in defined if isinstance(value, type))
    return {cls.kind: cls for cls in found if issubclass(cls, Payload) and cls.kind}


def encode_line(event: Event) -> bytes:
    """One line of strict JSON, newline included; a text that is no UTF-8 is written with escapes."""
    envelope = {
        "v": event.version,
        "time": round(event.time, 6),
        "run": event.run,
        "attempt": event.attempt,
        "source": event.source,
        "rank": event.rank,
        "seq": event.seq,
        "kind": event.payload.kind,
        "data": {
            field.name: _plain(getattr(event.payload, field.name))
            for field in dataclasses.fields(event.payload)
        },
    }
    return json.dumps(envelope, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode_line(line: bytes) -> Event | None:
    """The event of one line, or None for anything that is not a whole event of a known kind.

    Fields that this version does not know are left out; a missing field without default, or a value of the
    wrong type, makes the line unusable. Never raises on any bytes.
    """
    if not line.strip() or len(line) > LINE_LIMIT:
        return None
    try:
        raw = json.loads(line)
        if not isinstance(raw, dict):
            return None
        cls = payload_classes().get(raw["kind"])
        if cls is None:
            return None
        return Event(
            time=_finite(raw["time"]),
            run=_exact(raw["run"], str),
            attempt=_int(raw["attempt"]),
            source=_exact(raw["source"], str),
            rank=None if raw.get("rank") is None else _int(raw["rank"]),
            seq=_int(raw["seq"]),
            payload=_payload(cls, raw["data"]),
            version=_int(raw["v"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _payload(cls: type[Payload], data: Any) -> Payload:
    converters = _converters(cls.kind)
    return cls(
        **{name: converters[name](value) for name, value in _exact(data, dict).items() if name in converters}
    )


@cache
def _converters(kind: str) -> dict[str, Callable[[Any], Any]]:
    cls = payload_classes()[kind]
    hints = typing.get_type_hints(cls)
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(cls)}


def _converter(hint: Any) -> Callable[[Any], Any]:
    """A function that turns a JSON value into one of the annotated type, or raises TypeError; words that are
    not known stay as they are (`words.py`)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        [inner] = [_converter(argument) for argument in arguments if argument is not type(None)]
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _converter(arguments[0])
        return lambda value: tuple(item(entry) for entry in _exact(value, list))
    if hint in (int, float):
        return _int if hint is int else _float
    if origin is typing.Literal:
        return lambda value: _exact(value, str)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        known = {str(word): word for word in hint}
        return lambda value: known.get(_exact(value, str), value)
    return lambda value: _exact(value, origin or hint)


def _exact(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise TypeError(f"{value!r} is not a 64-bit integer")
    return value


def _float(value: Any) -> float:
    if isinstance(value, str):
        return NONFINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _finite(value: Any) -> float:
    number = _float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number
