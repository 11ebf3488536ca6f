"""What a rank is doing right now, in a page of memory that its node's agent reads: like a flight recorder.

The rank writes a few numbers before and after each collective. The page is an anonymous file (memfd) that the
rank holds open, found by its name among the rank's descriptors in /proc: no file to clean up, nothing on
shared storage, and readable while the rank is stopped, or holds Python's lock in native code for ever.

Layout, little-endian: a header of `HEADER`, then `LANES` records of `LANE`, one a process group. One writer;
a reader that meets a change reads again.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NAME = "llmtrain-flight"
MAGIC = 0x3154464C
HEADER = struct.Struct("<IIqd40s")
"""Magic, version, step, epoch seconds of the last change of what it does, what it does."""
LANE = struct.Struct("<16s16sIIQQd")
"""Axis, operation, identity of the group, whether the rank stands still for it, collectives entered and
finished, epoch seconds of the last entry."""
LANES = 24
SIZE = HEADER.size + LANES * LANE.size
VERSION = 1
TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """One process group, as one member sees it."""

    axis: str
    group: int
    """The same number for all members of a group."""
    operation: str
    """The last collective entered."""
    entered: int
    """Collectives entered so far; the members of a group enter the same ones in the same order."""
    finished: int
    waits: bool
    """Whether the rank stands still until the collective is done."""
    at: float
    """Epoch seconds of the last entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightView:
    """What one rank is doing."""

    step: int
    doing: str
    """fetch, forward, backward, ... with its micro-batch; empty between two passes of a pipeline."""
    since: float
    """Epoch seconds."""
    lanes: tuple[LaneView, ...]


def group_identity(ranks: Sequence[int]) -> int:
    """A number that names a group of ranks."""
    return zlib.crc32(",".join(map(str, ranks)).encode())


def find_page(pid: int) -> int | None:
    """Open the page of a process that lives; None where it has none, or may not be looked at."""
    folder = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                if str(entry.readlink()).startswith(f"/memfd:{NAME}"):
                    return os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    return None


def read_page(descriptor: int) -> FlightView | None:
    """What a page says; None when it is not one, or changes all the time."""
    before = b""
    for _ in range(TRIES):
        try:
            data = os.pread(descriptor, SIZE, 0)
        except OSError:
            return None
        if data == before:
            return _decode(data)
        before = data
    return _decode(before)


def _decode(data: bytes) -> FlightView | None:
    if len(data) < SIZE:
        return None
    magic, version, step, since, doing = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        return None
    lanes = []
    for number in range(LANES):
        axis, operation, group, waits, entered, finished, at = LANE.unpack_from(
            data, HEADER.size + number * LANE.size
        )
        if group:
            lanes.append(
                LaneView(
                    axis=_text(axis),
                    group=group,
                    operation=_text(operation),
                    entered=entered,
                    finished=finished,
                    waits=bool(waits),
                    at=at,
                )
            )
    return FlightView(step=step, doing=_text(doing), since=since, lanes=tuple(lanes))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")
