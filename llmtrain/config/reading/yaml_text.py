"""Strict YAML: text to nodes with line numbers, by the scalar rules of YAML 1.2 (core schema).

PyYAML supplies the events; its own resolver follows YAML 1.1 (`no` is false, `3e-4` is text, `24:00:00` is
86400) and is not used. Tags, anchors, aliases, several documents and repeated keys are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from llmtrain.config.reading.nodes import Node, Scalar, Sequence, Table, printable
from llmtrain.errors import Problem

MAX_BYTES = 1 << 20
"""Largest file that is read."""
MAX_DEPTH = 24
"""Deepest nesting; the schema needs five."""

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_INT = re.compile(r"[-+]?[0-9]{1,400}")
_OCTAL = re.compile(r"0o[0-7]{1,400}")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,400}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})


def resolve_scalar(text: str) -> str | int | float | bool | None:
    """Value of a plain (unquoted) scalar by the YAML 1.2 core schema."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return -math.inf if text[0] == "-" else math.inf
    return math.nan if text in _NAN else text


def parse_document(
    text: str, name: str, *, base: str = "", fixed_where: str = ""
) -> tuple[Node | None, list[Problem]]:
    """Nodes of a text and what is wrong with it; None when nothing could be read.

    `name` is the file in `file:line`; `fixed_where` replaces file and line altogether (for `--set`). `base`
    is the folder that relative paths in the text start at.
    """
    builder = _Builder(name, base, fixed_where)
    try:
        root = builder.document(yaml.parse(text, Loader=yaml.BaseLoader))
        return root, list(dict.fromkeys(builder.problems))
    except _TooDeep as error:
        return None, [*builder.problems, Problem(error.where, f"nested deeper than {MAX_DEPTH} levels")]
    except yaml.reader.ReaderError as error:
        return None, [_unreadable_character(error, text, builder)]
    except yaml.MarkedYAMLError as error:
        return None, [*builder.problems, _syntax_problem(error, builder)]


class _TooDeep(Exception):
    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


@dataclass(slots=True)
class _Builder:
    """Events to nodes; collects problems that leave the rest readable."""

    name: str
    base: str
    fixed_where: str
    problems: list[Problem] = field(default_factory=list)

    def where(self, mark: Any) -> str:
        """Place of a mark of the YAML parser, whose lines start at zero."""
        return self.fixed_where or (f"{self.name}:{mark.line + 1}" if mark is not None else self.name)

    def document(self, events: Iterator[Event]) -> Node | None:
        """The only document of the stream."""
        root: Node | None = None
        started = False
        for event in events:
            if isinstance(event, DocumentStartEvent):
                if started:
                    place = self.where(event.start_mark)
                    self.problems.append(
                        Problem(place, "a second document starts here", "one file holds one document")
                    )
                    return root
                started = True
                root = self.node(next(events), events, 0)
        return root

    def node(self, event: Event, events: Iterator[Event], depth: int) -> Node:
        """The node that an event starts."""
        where = self.where(event.start_mark)
        if depth > MAX_DEPTH:
            raise _TooDeep(where)
        self._refuse_extras(event, where)
        if isinstance(event, ScalarEvent):
            plain = event.style is None
            return Scalar(
                resolve_scalar(event.value) if plain else event.value, event.value, where, self.base
            )
        if isinstance(event, SequenceStartEvent):
            return Sequence(tuple(self._items(events, depth)), where)
        if isinstance(event, MappingStartEvent):
            return self._table(events, where, depth)
        return Scalar(None, "", where, unreadable=True)

    def _items(self, events: Iterator[Event], depth: int) -> Iterator[Node]:
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                return
            yield self.node(event, events, depth + 1)

    def _table(self, events: Iterator[Event], where: str, depth: int) -> Table:
        entries: dict[str, Node] = {}
        keys: dict[str, str] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            place = self.where(event.start_mark)
            key = self.node(event, events, depth + 1)
            value = self.node(next(events), events, depth + 1)
            if not isinstance(key, Scalar):
                self.problems.append(Problem(place, "a key must be a single word", "write `key: value`"))
            elif key.text in entries:
                first = keys[key.text]
                message = f"`{printable(key.text)}` is given twice; first at {first}"
                self.problems.append(Problem(place, message, "keep one of the two"))
            else:
                entries[key.text], keys[key.text] = value, place
        return Table(entries, keys, where)

    def _refuse_extras(self, event: Any, where: str) -> None:
        """Tags, anchors and aliases are not part of the format."""
        anchor = printable(getattr(event, "anchor", None) or "")
        tag = printable(getattr(event, "tag", None) or "").replace("tag:yaml.org,2002:", "!!")
        if isinstance(event, AliasEvent):
            self.problems.append(Problem(where, f"alias `*{anchor}` is not allowed", "write the value out"))
        elif anchor:
            self.problems.append(Problem(where, f"anchor `&{anchor}` is not allowed", "remove it"))
        if tag:
            self.problems.append(Problem(where, f"tag `{tag}` is not allowed", "write the plain value"))


def _unreadable_character(error: yaml.reader.ReaderError, text: str, builder: _Builder) -> Problem:
    line = text.count("\n", 0, error.position)
    message = (
        f"character U+{ord(text[error.position]):04X} is not allowed"
        if error.position < len(text)
        else "not text"
    )
    place = builder.fixed_where or f"{builder.name}:{line + 1}"
    return Problem(place, message, "is this a YAML file?")


def _syntax_problem(error: yaml.MarkedYAMLError, builder: _Builder) -> Problem:
    """A syntax error in words; PyYAML's own, but for the few that people really meet."""
    mark = error.problem_mark or error.context_mark
    where = builder.where(mark)
    text = (error.problem or "cannot be read").strip()
    if "'\\t'" in text:
        return Problem(where, "a tab where only spaces may stand", "indent with spaces")
    if "mapping values are not allowed here" in text:
        return Problem(
            where,
            "`:` where no key may stand",
            "check the indentation and the space after `:`; quote a text that holds `: `",
        )
    if "could not find expected ':'" in text:
        start = builder.where(error.context_mark)
        return Problem(start, "a key without `:`", "write `key: value`, with a space after the colon")
    if "expected <block end>" in text:
        return Problem(where, "this line does not fit the lines above", "check its indentation")
    context = f" {error.context.strip()}" if error.context else ""
    return Problem(where, f"not valid YAML: {printable(text, 120)}{context}")
