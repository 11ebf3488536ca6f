"""Frozen dataclasses to JSON and back: strict, typed by the annotations that the YAML uses too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.config.reading.build import Builder
from llmtrain.config.reading.nodes import Table, from_plain
from llmtrain.config.recipe import YAML_NAMES
from llmtrain.errors import ConfigError, Problem

T = TypeVar("T")


def to_json(value: Any) -> dict[str, Any]:
    """JSON object of a dataclass; keys as in YAML. Raises TypeError for a field that JSON cannot hold."""
    encoded = _encode(value)
    if not isinstance(encoded, dict):
        raise TypeError(f"{type(value).__name__} is no dataclass")
    return encoded


def from_json(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """Dataclass of a JSON object; raises ConfigError with every unknown, missing or wrong key.

    `where` names the source.
    """
    try:
        table = from_plain(mapping, where)
    except TypeError as error:
        raise ConfigError([Problem(where, str(error))]) from None
    if not isinstance(table, Table):
        raise ConfigError([Problem(where, "must be an object")])
    builder = Builder(finite=False)
    built: T = builder.section(cls, table)
    if builder.problems:
        raise ConfigError(builder.problems)
    return built


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces, ASCII.

    Raises ValueError for infinities and NaN.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a value's canonical JSON."""
    import hashlib  # OpenSSL behind it is slow to load, and most commands need no digest.

    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()[:16]


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {
            YAML_NAMES.get(entry.name, entry.name): _encode(getattr(value, entry.name))
            for entry in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _encode(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")
