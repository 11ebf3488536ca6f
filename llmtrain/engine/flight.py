"""This rank's flight recorder: what it does, and which collective it entered last (`run/flight.py`).

A collective costs three small writes into memory of the process, about a microsecond; nothing is ever
formatted, sent or flushed.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence

from llmtrain.run.flight import HEADER, LANE, LANES, MAGIC, NAME, SIZE, VERSION, group_identity


class Lane:
    """One process group of this rank."""

    __slots__ = ("_at", "_axis", "_entered", "_finished", "_group", "_offset", "_operation", "_page")

    def __init__(self, page: mmap.mmap | bytearray, offset: int, axis: str, group: int) -> None:
        self._page, self._offset, self._axis, self._group = page, offset, axis.encode()[:16], group
        self._operation, self._entered, self._finished, self._at = b"", 0, 0, 0.0
        self._write(0)

    def enter(self, operation: str) -> None:
        """This rank has entered a collective."""
        self._operation = operation.encode()
        self._entered += 1
        self._at = time.time()
        self._write(0)

    def wait(self) -> None:
        """This rank stands still for it from now on."""
        self._write(1)

    def finish(self) -> None:
        """The collective is done, as far as this rank can tell."""
        self._finished += 1
        self._write(0)

    def _write(self, waits: int) -> None:
        LANE.pack_into(
            self._page,
            self._offset,
            self._axis,
            self._operation,
            self._group,
            waits,
            self._entered,
            self._finished,
            self._at,
        )


class FlightRecorder:
    """The page of this process. Without `open` nobody can read it, and nothing else changes."""

    def __init__(self) -> None:
        self._page: mmap.mmap | bytearray = bytearray(SIZE)
        self._lanes = 0
        self._step = 0
        self.lane_of_nobody = Lane(bytearray(LANE.size), 0, "", 0)
        """For groups of one rank, and for more groups than fit."""

    def open(self) -> None:
        """Let the agent find the page. Does nothing where the system has no memfd."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create(NAME)
            os.ftruncate(descriptor, SIZE)
            # The descriptor stays open on purpose: it is what the agent looks for.
            self._page = mmap.mmap(descriptor, SIZE)
            self.doing("start")

    def lane(self, axis: str, ranks: Sequence[int]) -> Lane:
        """The record of one more process group."""
        if len(ranks) < 2 or self._lanes >= LANES:
            return self.lane_of_nobody
        offset = HEADER.size + self._lanes * LANE.size
        self._lanes += 1
        return Lane(self._page, offset, axis, group_identity(ranks))

    def begin_step(self, step: int) -> None:
        """A step begins with its data."""
        self._step = step
        self.doing("fetch")

    def doing(self, what: str) -> None:
        """What this rank does from now on; empty: it waits for its neighbours in the pipeline."""
        HEADER.pack_into(self._page, 0, MAGIC, VERSION, self._step, time.time(), what.encode()[:40])


flight = FlightRecorder()
"""A process is one rank, and has one recorder."""
