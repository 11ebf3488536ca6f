"""Traces of single steps: what every rank computed when, and the pipeline bubble measured from it.

One file a rank, in the JSON Array Format of Chrome's trace viewer, which chrome://tracing and Perfetto open
as it is: `[`, then one event a line with a comma behind it. The closing bracket is left out, as the format
allows, so that a rank only ever appends and a torn last line spoils nothing. Times are microseconds of the
writer's wall clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

COMPUTE = frozenset({"forward", "loss", "backward", "weight"})
"""Spans in which a pipeline stage works; whatever lies between them on a stage is bubble."""

PHASES = ("fetch", "passes", "reduce", "agree", "update")
"""Parts of a step, one after the other; `agree` ends with a collective over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlace:
    """Whose trace it is."""

    rank: int
    host: str
    pp: int
    dp: int
    cp: int
    tp: int
    stages: int
    """Pipeline ranks; 1 without a pipeline."""
    schedule: str
    chunks: int
    """Model chunks of a pipeline rank."""
    micro_batches: int
    """Of this rank's replica, in a step."""

    @property
    def column(self) -> tuple[int, int, int]:
        """The pipeline that the rank belongs to: its place on the other axes."""
        return self.dp, self.cp, self.tp


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time of a rank, in epoch seconds of its host's clock."""

    name: str
    """forward | loss | backward (of the inputs only where `weight` follows) | weight | wait, or a phase."""
    step: int
    start: float
    stop: float
    stage: int = -1
    """Model chunk, counted over the whole pipeline; -1 for phases."""
    micro_batch: int = -1


@dataclass(frozen=True, slots=True)
class RankTrace:
    """All traced steps of one rank in one attempt."""

    place: TracePlace
    spans: tuple[Span, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that were traced, ascending."""
        return tuple(sorted({span.step for span in self.spans}))

    def of_step(self, step: int, names: Iterable[str] = COMPUTE) -> Iterator[Span]:
        """Spans of some kinds in one step."""
        wanted = frozenset(names)
        return (span for span in self.spans if span.step == step and span.name in wanted)


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle share of one pipeline in one step."""

    column: tuple[int, int, int]
    step: int
    ratio: float
    """1 - busy time of all stages / (stages x time from the first pass to the end of the last one)."""
    seconds: float
    """Time from the first pass to the end of the last one."""


# ---- writing
def header_lines(place: TracePlace) -> bytes:
    """What a new file begins with: the opening bracket, names for the viewer, and the place."""
    title = f"rank {place.rank}: pp{place.pp} dp{place.dp} tp{place.tp} on {place.host}"
    return b"[\n" + b"".join(
        _line({"ph": "M", "pid": place.rank, "tid": 0, "name": name, "args": arguments})
        for name, arguments in (
            ("process_name", {"name": title}),
            ("process_sort_index", {"sort_index": place.rank}),
            ("llmtrain_place", asdict(place)),
        )
    )


def span_lines(place: TracePlace, spans: Iterable[Span]) -> bytes:
    """The lines of some spans. Passes, waits and phases are rows of their own in the viewer."""
    return b"".join(
        _line(
            {
                "ph": "X",
                "name": span.name,
                "cat": "phase" if span.name in PHASES else "pipeline",
                "pid": place.rank,
                "tid": 0 if span.name in PHASES else 1,
                "ts": round(span.start * 1e6, 1),
                "dur": round(max(0.0, span.stop - span.start) * 1e6, 1),
                "args": {"step": span.step, "stage": span.stage, "micro_batch": span.micro_batch},
            }
        )
        for span in spans
    )


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), allow_nan=False).encode("ascii") + b",\n"


# ---- reading
def read_trace(path: Path) -> RankTrace | None:
    """One rank's trace; None when it does not say whose it is. Lines that are torn or of another kind are
    passed over. Raises OSError."""
    place: TracePlace | None = None
    spans: list[Span] = []
    for line in path.read_bytes().splitlines():
        event = _event(line)
        if event.get("name") == "llmtrain_place":
            place = _place(event.get("args"))
        elif event.get("ph") == "X" and (span := _span(event)) is not None:
            spans.append(span)
    return None if place is None else RankTrace(place, tuple(spans))


def read_traces(folder: Path) -> list[RankTrace]:
    """All ranks' traces of an attempt's `trace/` folder, in rank order; none when there is no such folder."""
    found = (read_trace(path) for path in sorted(folder.glob("rank-*.json")))
    return sorted((trace for trace in found if trace is not None), key=lambda trace: trace.place.rank)


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line.rstrip().removesuffix(b","))
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _place(arguments: Any) -> TracePlace | None:
    try:
        return TracePlace(**arguments)
    except TypeError:
        return None


def _span(event: dict[str, Any]) -> Span | None:
    try:
        start, length, details = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6, event["args"]
        return Span(
            name=str(event["name"]),
            step=int(details["step"]),
            start=start,
            stop=start + length,
            stage=int(details["stage"]),
            micro_batch=int(details["micro_batch"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


# ---- measuring
def measure_bubbles(traces: Sequence[RankTrace]) -> list[Bubble]:
    """The bubble of every pipeline whose ranks were all traced, for every step that they all have; by column
    and step.

    Ranks of one host share a clock. Clocks of different hosts are set by the end of the step's last
    collective over all ranks, which all of them leave at the same time.
    """
    columns: dict[tuple[int, int, int], list[RankTrace]] = defaultdict(list)
    for trace in traces:
        columns[trace.place.column].append(trace)
    found: list[Bubble] = []
    for column, members in sorted(columns.items()):
        if len(members) != members[0].place.stages:
            continue
        common = set.intersection(*(set(member.steps) for member in members))
        bubbles = (_bubble(column, members, step) for step in sorted(common))
        found.extend(bubble for bubble in bubbles if bubble is not None)
    return found


def _bubble(column: tuple[int, int, int], members: Sequence[RankTrace], step: int) -> Bubble | None:
    offsets = clock_offsets(members, step)
    busy, starts, stops = 0.0, [], []
    for member in members:
        spans = list(member.of_step(step))
        if not spans:
            return None
        offset = offsets.get(member.place.host, 0.0)
        busy += sum(span.stop - span.start for span in spans)
        starts.append(min(span.start for span in spans) - offset)
        stops.append(max(span.stop for span in spans) - offset)
    seconds = max(stops) - min(starts)
    if seconds <= 0.0:
        return None
    return Bubble(column, step, max(0.0, 1.0 - busy / (len(members) * seconds)), seconds)


def clock_offsets(members: Sequence[RankTrace], step: int) -> dict[str, float]:
    """Seconds by which each host's clock is ahead of the first one's, from the end of the phase `agree`."""
    ends: dict[str, list[float]] = defaultdict(list)
    for member in members:
        ends[member.place.host].extend(span.stop for span in member.of_step(step, ("agree",)))
    means = {host: mean(marks) for host, marks in ends.items() if marks}
    first = next(iter(means.values()), 0.0)
    return {host: mark - first for host, mark in means.items()}
