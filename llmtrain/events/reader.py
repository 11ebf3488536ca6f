"""Read events back: whole files, tails of big files, files that still grow, and many files in one order.

Lines that are torn, hostile or of an unknown kind are skipped and counted, never raised.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from llmtrain.events.event import LINE_LIMIT, Event, decode_line

CHUNK = 1 << 18


class EventTail:
    """Reads what was appended to one file since the last `poll`; the file need not exist yet.

    A last line without its newline is kept back until the rest arrives. `skipped` counts unusable lines. A
    file that became shorter was replaced: it is read again from its start.
    """

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        self.path = path
        self.skipped = 0
        self._offset = 0
        self._partial = b""
        self._in_long_line = False
        self._tail_bytes = tail_bytes

    def poll(self, max_bytes: int | None = None) -> list[Event]:
        """Events of the whole lines that were appended; reads at most `max_bytes` of the file (default:
        all)."""
        return list(self.events(max_bytes))

    def events(self, max_bytes: int | None = None) -> Iterator[Event]:
        """The same as `poll`, one by one, so that a big file is never held in memory."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            self._start(size)
            end = size if max_bytes is None else min(size, self._offset + max_bytes)
            file.seek(self._offset)
            while self._offset < end:
                chunk = file.read(min(CHUNK, end - self._offset))
                if not chunk:
                    break
                self._offset += len(chunk)
                yield from self._decode(chunk)

    def _start(self, size: int) -> None:
        if size < self._offset:
            self._offset, self._partial, self._in_long_line = 0, b"", False
        if self._tail_bytes is not None and self._offset == 0 and size > self._tail_bytes:
            # The first piece is most likely the end of a line: treat it as the rest of a line that is too
            # long.
            self._offset, self._in_long_line = size - self._tail_bytes, True
        self._tail_bytes = None

    def _decode(self, chunk: bytes) -> Iterator[Event]:
        *lines, rest = (self._partial + chunk).split(b"\n")
        self._partial = rest
        for line in lines:
            if self._in_long_line:
                self._in_long_line = False
                continue
            event = decode_line(line)
            if event is not None:
                yield event
            elif line.strip():
                self.skipped += 1
        if len(self._partial) > LINE_LIMIT:
            self.skipped += not self._in_long_line
            self._partial, self._in_long_line = b"", True


def read_events(path: Path, *, tail_bytes: int | None = None) -> Iterator[Event]:
    """Events of a file in the order in which they were written; none when there is no file.

    With `tail_bytes` only about so much of the end is read. A whole last line counts even without its
    newline.
    """
    tail = EventTail(path, tail_bytes=tail_bytes)
    yield from tail.events()
    last = decode_line(tail._partial) if not tail._in_long_line else None
    if last is not None:
        yield last


def merge(streams: Iterable[Iterable[Event]]) -> Iterator[Event]:
    """All events in order of time; the order inside one stream is kept even where its clock stepped back."""
    keyed = [_keyed(stream, index) for index, stream in enumerate(streams)]
    for _, _, _, event in heapq.merge(*keyed):
        yield event


def _keyed(stream: Iterable[Event], index: int) -> Iterator[tuple[float, int, int, Event]]:
    latest = float("-inf")
    for position, event in enumerate(stream):
        latest = max(latest, event.time)
        yield latest, index, position, event


class FolderTail:
    """Follows all files that `list_files` names, also those that appear later."""

    def __init__(self, list_files: Callable[[], Sequence[Path]], *, tail_bytes: int | None = None) -> None:
        self._list_files = list_files
        self._tail_bytes = tail_bytes
        self._tails: dict[Path, EventTail] = {}

    @property
    def skipped(self) -> int:
        """Unusable lines met so far."""
        return sum(tail.skipped for tail in self._tails.values())

    def poll(self) -> list[Event]:
        """What was appended to any of the files, in order of time."""
        files = self._list_files()
        for path in files:
            if path not in self._tails:
                self._tails[path] = EventTail(path, tail_bytes=self._tail_bytes)
        return list(merge([self._tails[path].poll() for path in files]))
