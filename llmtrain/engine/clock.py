"""When a rank's passes and the phases of a step began and ended, on the device's own time line."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmtrain.config.layout import Layout
from llmtrain.engine.device import Device, Stamp
from llmtrain.engine.flight import flight
from llmtrain.engine.parallel.groups import Groups
from llmtrain.events.trace import Span, TracePlace, header_lines, span_lines

SHORTEST_WAIT = 20e-6
"""Seconds; a shorter gap between two passes is the schedule's own bookkeeping, not worth a span."""

_AFTER = {"fetch": "", "passes": "reduce", "reduce": "agree", "agree": "update"}
"""What a rank does once a phase is over, in the flight recorder's words."""

NOWHERE = (-1, -1)
"""Stage and micro-batch of what belongs to none."""


class Clock:
    """Stamps of one step. They are read only after the device has finished it, so that taking them never
    makes it wait."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._passes: list[tuple[str, int, int, Stamp, Stamp]] = []
        self._laps: list[tuple[str, Stamp]] = []
        self.begin()

    def begin(self) -> None:
        """A step begins: forget the one before."""
        self._passes.clear()
        self._laps.clear()
        self._start = self._device.stamp()
        self._epoch = time.time()

    def run(self, what: str, stage: int, micro_batch: int, work: Callable[[], Any]) -> Any:
        """Do some work of a stage: `what` is forward, loss, backward or weight."""
        start = self._device.stamp()
        flight.doing(f"{what} of micro-batch {micro_batch}, stage {stage}")
        result = work()
        flight.doing("")
        self._passes.append((what, stage, micro_batch, start, self._device.stamp()))
        return result

    def lap(self, phase: str) -> None:
        """A phase of the step ends here; it began where the one before ended."""
        self._laps.append((phase, self._device.stamp()))
        flight.doing(_AFTER.get(phase, phase))

    def has_ended(self, phase: str) -> bool:
        """Whether a phase of the step is over."""
        return any(name == phase for name, _ in self._laps)

    def compute_seconds(self) -> float:
        """Seconds of this rank's passes, tensor-parallel collectives included. Only once the device is
        done."""
        return sum(self._device.seconds(start, stop) for _, _, _, start, stop in self._passes)

    def phase_seconds(self, phase: str) -> float:
        """Seconds of a phase that has ended; 0 when there was none. Only once the device is done."""
        before = self._start
        for name, stop in self._laps:
            if name == phase:
                return self._device.seconds(before, stop)
            before = stop
        return 0.0

    def spans(self, step: int) -> Iterator[Span]:
        """All of the step, in epoch seconds: phases, passes, and the waits between passes. Only once the
        device is done."""
        begin = 0.0
        for phase, stamp in self._laps:
            end = self._since(stamp)
            yield self._span(phase, step, (begin, end), NOWHERE)
            if phase == "passes":
                yield from self._pass_spans(step, begin, end)
            begin = end

    def _pass_spans(self, step: int, begin: float, end: float) -> Iterator[Span]:
        free = begin
        for what, stage, micro_batch, first, last in self._passes:
            start, stop = self._since(first), self._since(last)
            if start - free >= SHORTEST_WAIT:
                yield self._span("wait", step, (free, start), NOWHERE)
            yield self._span(what, step, (start, stop), (stage, micro_batch))
            free = stop
        if end - free >= SHORTEST_WAIT:
            yield self._span("wait", step, (free, end), NOWHERE)

    def _since(self, stamp: Stamp) -> float:
        return self._device.seconds(self._start, stamp)

    def _span(self, name: str, step: int, times: tuple[float, float], place: tuple[int, int]) -> Span:
        start, stop = times
        return Span(name, step, self._epoch + start, self._epoch + stop, *place)


class TraceFile:
    """One rank's trace of one attempt: steps are appended, nothing is kept open."""

    def __init__(self, path: Path, place: TracePlace) -> None:
        self._path, self._place = path, place

    def append(self, spans: Iterator[Span]) -> None:
        """Add one step. Raises OSError."""
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write((header_lines(self._place) if is_new else b"") + span_lines(self._place, spans))


def trace_place(groups: Groups, layout: Layout, micro_batches: int) -> TracePlace:
    """What a trace says about its rank."""
    place = groups.place
    return TracePlace(
        rank=groups.rank,
        host=socket.gethostname(),
        pp=place.pp,
        dp=place.dp,
        cp=place.cp,
        tp=place.tp,
        stages=layout.pp,
        schedule=layout.schedule,
        chunks=layout.vpp,
        micro_batches=micro_batches,
    )
