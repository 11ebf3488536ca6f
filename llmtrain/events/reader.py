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

    With `start` (bytes) only whole lines that begin after that place are read. A last line without its
    newline is kept back until the rest arrives. `skipped` counts unusable lines. A file that became shorter
    was replaced: it is read again from its start.
    """

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self.path = path
        self.skipped = 0
        self._offset = start
        self._partial = b""
        # What stands at `start` is most likely the end of a line: treat it as the rest of a line that is
        # too long.
        self._in_long_line = start > 0

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
            if size < self._offset:
                self._offset, self._partial, self._in_long_line = 0, b"", False
            end = size if max_bytes is None else min(size, self._offset + max_bytes)
            file.seek(self._offset)
            while self._offset < end:
                chunk = file.read(min(CHUNK, end - self._offset))
                if not chunk:
                    break
                self._offset += len(chunk)
                yield from self._decode(chunk)

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
    tail = EventTail(path, start=0 if tail_bytes is None else max(0, size_of(path) - tail_bytes))
    yield from tail.events()
    last = decode_line(tail._partial) if not tail._in_long_line else None
    if last is not None:
        yield last


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sample_events(
    path: Path, *, end: int, windows: int, window_bytes: int = 2048, kinds: Sequence[str]
) -> list[Event]:
    """Evenly spread events of a big file: of each kind the first one in each of `windows` windows before
    byte `end`.

    Reads windows x window_bytes, however big the file is; the cost of a view does not grow with the run.
    """
    found: list[Event] = []
    marks = [f'"kind":"{kind}"'.encode() for kind in kinds]
    try:
        with path.open("rb") as file:
            for index in range(windows):
                file.seek(index * end // windows)
                lines = file.read(window_bytes).split(b"\n")[0 if index == 0 else 1 : -1]
                firsts = (next((line for line in lines if mark in line), b"") for mark in marks)
                found += [event for line in firsts if (event := decode_line(line)) is not None]
    except OSError:
        return found
    return found


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
    """Follows all files that `list_files` names, also those that appear later, each from its start."""

    def __init__(self, list_files: Callable[[], Sequence[Path]]) -> None:
        self._list_files = list_files
        self._tails: dict[Path, EventTail] = {}

    def start_at(self, path: Path, offset: int) -> None:
        """Follow one file from a byte offset on instead."""
        self._tails[path] = EventTail(path, start=offset)

    @property
    def skipped(self) -> int:
        """Unusable lines met so far."""
        return sum(tail.skipped for tail in self._tails.values())

    def poll(self) -> list[Event]:
        """What was appended to any of the files, in order of time."""
        return list(self.events())

    def events(self) -> Iterator[Event]:
        """The same as `poll`, one by one, so that big files are never held in memory."""
        files = self._list_files()
        for path in files:
            if path not in self._tails:
                self._tails[path] = EventTail(path)
        return merge([self._tails[path].events() for path in files])
