"""Reading documents out of file ranges, as a stream of sections in bounded memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from llmtrain.corpus.sources import FileRange
from llmtrain.errors import UsageError

BLOCK = 1 << 18
FIELD = "text"
"""Field of a jsonl line that holds the document."""
LONGEST_LINE = 1 << 30
"""A jsonl line beyond this many bytes is taken for damage."""


@dataclass(frozen=True, slots=True)
class Section:
    """A piece of a document that goes to one split as a whole."""

    text: str
    ends_document: bool
    undecodable: bool = False
    """Bytes that are not UTF-8 were replaced by U+FFFD."""


def read_sections(part: FileRange) -> Iterator[Section]:
    """All sections that begin in a range; raises UsageError naming file and line, OSError when it cannot be
    read."""
    with part.file.path.open("rb") as stream:
        start = _line_start(stream, part.begin)
        if part.file.kind == "jsonl":
            yield from _jsonl(stream, part, start)
        else:
            yield from _text(stream, part, start)


def _line_start(stream: BinaryIO, begin: int) -> int:
    """First byte at or after `begin` that begins a line."""
    if begin == 0:
        return 0
    stream.seek(begin - 1)
    while block := stream.readline(BLOCK):
        if block.endswith(b"\n"):
            break
    return stream.tell()


def _jsonl(stream: BinaryIO, part: FileRange, start: int) -> Iterator[Section]:
    stream.seek(start)
    position = start
    while position < part.end and (line := stream.readline(LONGEST_LINE)):
        if line.strip():
            yield Section(_field(line, part, position), True)
        position += len(line)


def _field(line: bytes, part: FileRange, position: int) -> str:
    try:
        value = json.loads(line)[FIELD]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        number = _line_number(part, position)
        fault = f"has no field {FIELD!r}" if isinstance(error, KeyError) else f"is not a JSON object: {error}"
        raise UsageError(f"line {fault}", where=f"{part.file.path}:{number}") from error
    if not isinstance(value, str):
        where = f"{part.file.path}:{_line_number(part, position)}"
        raise UsageError(f"field {FIELD!r} is not a text but {type(value).__name__}", where=where)
    return value


def _line_number(part: FileRange, position: int) -> int:
    """Number, from 1, of the line that begins at a byte; counted only for an error."""
    number, left = 1, position
    with part.file.path.open("rb") as stream:
        while left and (block := stream.read(min(BLOCK, left))):
            number += block.count(b"\n")
            left -= len(block)
    return number


def _text(stream: BinaryIO, part: FileRange, start: int) -> Iterator[Section]:
    """Cut at the last blank line, else the last line end, else wherever the section is full."""
    stream.seek(start)
    end = _text_end(stream, part)
    stream.seek(start)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    left, text, undecodable = end - start, "", False
    while left > 0 and (block := stream.read(min(left, max(BLOCK, part.file.section)))):
        left -= len(block)
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


def _text_end(stream: BinaryIO, part: FileRange) -> int:
    """A range ends where the line that crosses its end does, where the next range begins."""
    return part.file.size if part.end >= part.file.size else _line_start(stream, part.end)


def _cut(text: str, start: int, size: int) -> int:
    for mark in ("\n\n", "\n"):
        place = text.rfind(mark, start + size // 2, start + size)
        if place >= 0:
            return place + len(mark)
    return start + size
