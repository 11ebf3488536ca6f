"""Reading documents out of file ranges, as a stream of sections in bounded memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from llmtrain.corpus.preparation.compression import TornError, open_input
from llmtrain.corpus.preparation.parquet import read_column
from llmtrain.corpus.preparation.sources import FileRange, unreadable
from llmtrain.errors import InputError, UsageError

BLOCK = 1 << 18
FIELD = "text"
"""Field of a jsonl line that holds the document."""
LINE = f'each line of a jsonl file is an object like {{"{FIELD}": "a document"}}'
LONGEST_LINE = 1 << 30
"""A jsonl line beyond this many bytes is taken for damage."""
EVERYTHING = 1 << 62
"""Size of a compressed input before it was read."""
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Section:
    """A piece of a document that goes to one split as a whole."""

    text: str
    ends_document: bool
    undecodable: bool = False
    """Bytes that are not UTF-8 were replaced by U+FFFD."""


def read_sections(part: FileRange) -> Iterator[Section]:
    """All sections that begin in a range. Raises UsageError naming file and line, InputError for a torn
    input, CorpusError when the disk fails."""
    file = part.file
    if file.kind == "parquet":
        yield from (Section(text, True) for text in read_column(file.path, part.begin, part.end))
        return
    try:
        with open_input(file.path, file.compression) as stream:
            begin, size = (0, EVERYTHING) if file.compression else (part.begin, part.end - part.begin)
            start = _line_start(stream, begin)
            yield from (_jsonl if file.kind == "jsonl" else _text)(stream, part, start, begin + size)
    except TornError as error:
        raise InputError(f"{error.strerror}", where=str(file.path)) from error
    except OSError as error:
        raise unreadable(file.path, error) from error


def _line_start(stream: BinaryIO, begin: int) -> int:
    """First byte at or after `begin` that begins a line; the stream is left there."""
    if begin == 0:
        return 0
    stream.seek(begin - 1)
    while block := stream.readline(BLOCK):
        if block.endswith(b"\n"):
            break
    return stream.tell()


def _jsonl(stream: BinaryIO, part: FileRange, start: int, end: int) -> Iterator[Section]:
    position, number = start, 0
    while position < end and (line := stream.readline(LONGEST_LINE)):
        number += 1
        if line.strip():
            text = _field(line, part, start, number)
            # Halves of a surrogate pair, which no bytes stand for, come as escapes alone.
            yield Section(text, True, b"\\u" in line and _HALF_A_PAIR.search(text) is not None)
        position += len(line)


def _field(line: bytes, part: FileRange, start: int, number: int) -> str:
    """Text of the `number`-th line after byte `start`."""
    try:
        value = json.loads(line)[FIELD]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        where = f"{part.file.path}:{number + _lines_before(part, start)}"
        raise UsageError(f"line {_fault(error)}", where=where, hint=LINE) from error
    if not isinstance(value, str):
        where = f"{part.file.path}:{number + _lines_before(part, start)}"
        raise UsageError(f"field {FIELD!r} is not a text but {type(value).__name__}", where=where, hint=LINE)
    return value


def _fault(error: Exception) -> str:
    match error:
        case KeyError():
            return f"has no field {FIELD!r}"
        case json.JSONDecodeError():
            return f"is not a JSON object: {error.msg} (character {error.pos + 1})"
        case TypeError():
            return "is not a JSON object, but a value of another kind"
        case RecursionError():
            return "is not a JSON object of a text: it is nested too deeply"
        case _:
            return f"is not a JSON object: {error}"


def _lines_before(part: FileRange, start: int) -> int:
    """Lines before a byte; counted only for an error."""
    count, left = 0, start
    with part.file.path.open("rb") as stream:
        while left and (block := stream.read(min(BLOCK, left))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _text(stream: BinaryIO, part: FileRange, start: int, end: int) -> Iterator[Section]:
    """Cut at the last blank line, else the last line end, else wherever the section is full.

    A range ends where the line that crosses its end does, which is where the next range begins.
    """
    if not part.file.compression:
        end = part.file.size if part.end >= part.file.size else _line_start(stream, part.end)
        stream.seek(start)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    left, text, undecodable = end - start, "", False
    while left > 0:
        block = stream.read(min(left, max(BLOCK, part.file.section)))
        left = left - len(block) if block else 0
        decoded = decoder.decode(block, final=left <= 0)
        undecodable = undecodable or ("\ufffd" in decoded and b"\xef\xbf\xbd" not in block)
        text += decoded
        start = 0
        while len(text) - start > part.file.section:
            cut = _cut(text, start, part.file.section)
            yield Section(text[start:cut], False, undecodable)
            start = cut
        text = text[start:]
    if text:
        yield Section(text, True, undecodable)


def _cut(text: str, start: int, size: int) -> int:
    for mark in ("\n\n", "\n"):
        place = text.rfind(mark, start + size // 2, start + size)
        if place >= 0:
            return place + len(mark)
    return start + size
