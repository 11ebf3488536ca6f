"""From a run's folder to its state, incrementally, at a cost that does not grow with the length of the
run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import RunError
from llmtrain.events.event import Event
from llmtrain.events.reader import EventTail, FolderTail, merge, sample_events, size_of
from llmtrain.events.records import RunStatus
from llmtrain.events.run_state import RunState
from llmtrain.events.state import fold
from llmtrain.observe.job_facts import JobFacts, read_job_facts
from llmtrain.run.layout import AttemptDir, RunDir
from llmtrain.run.lease import LeaseHolder, read_holder

WHOLE_BYTES = 1 << 19
"""Up to so many bytes of events are read whole; bigger runs are read at their ends and sampled in between."""
CURVE_WINDOWS = 256
CURVE_KINDS = ("step_finished", "evaluated", "checkpoint_committed")
HEAD_BYTES = 4096
FIRST_LINE_BYTES = 384
"""Holds a rank's first event: where it runs."""
RANKS_BYTES = 3 << 16
"""Bytes read over all ranks of the newest attempt but rank 0."""
SUPERVISOR_BYTES = 1 << 16
OLD_ATTEMPTS = 64
"""Newest attempts whose events are looked at in a big run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """All that a view shows, at one moment."""

    run: RunDir
    job: JobFacts
    state: RunState
    holder: LeaseHolder | None
    """Who supervises, or last supervised, the run."""
    now: float
    complete: bool = True
    """False: the events were too many to read them all; sums over an attempt's steps are estimates."""

    @property
    def is_supervised(self) -> bool:
        """Whether a live supervisor holds the run."""
        return self.holder is not None and self.holder.is_alive

    @property
    def status(self) -> RunStatus:
        """The state's, or `interrupted` when the run goes on according to its events but nobody is in charge,
        or `created` before anybody was."""
        told = self.state.status
        if told.is_over or self.is_supervised:
            return told
        if self.holder is None and not self.state.attempts:
            return RunStatus.CREATED
        return RunStatus.INTERRUPTED

    @property
    def nodes_at_first(self) -> int:
        """Nodes of the oldest attempt known."""
        return len(self.state.attempts[0].nodes) if self.state.attempts else 0

    @property
    def is_degraded(self) -> bool:
        """Whether the newest attempt has fewer nodes than the first one had."""
        current = self.state.current
        return current is not None and bool(current.nodes) and len(current.nodes) < self.nodes_at_first

    @property
    def slowdown(self) -> float | None:
        """Measured step time over the planned one, on the planned layout; None when one is unknown."""
        pace, planned = self.state.seconds_per_step, self.job.planned_step_seconds
        if not pace or not planned or dict(self.layout) != dict(self.job.layout):
            return None
        return pace / planned

    @property
    def layout(self) -> Mapping[str, Any]:
        """Layout of the newest attempt, else the planned one."""
        current = self.state.current
        return current.layout if current and current.layout else self.job.layout


class RunReader:
    """Follows one run: each `poll` reads what was appended and folds it.

    A run of up to WHOLE_BYTES of events is read whole. Of a bigger one the first poll reads heads, tails
    and evenly spread samples: every attempt's course, every rank's last sign of life, and the curve over
    all steps.
    """

    def __init__(self, run: RunDir, *, whole: bool = False) -> None:
        self.run = run
        self.job = read_job_facts(run)
        self.state = RunState(run=run.run_id, total_steps=self.job.steps)
        self.complete = True
        self._whole = whole
        self._started = False
        self._facts_of = 0
        self._settled: set[int] = set()
        self._tail = FolderTail(self._files)

    def poll(self) -> list[Event]:
        """New events in order of time; `state` holds them already."""
        events = list(self._events())
        self.state = fold(events, self.state)
        return events

    def advance(self) -> RunState:
        """Like `poll`, for callers that need only the state; holds no event in memory."""
        self.state = fold(self._events(), self.state)
        return self.state

    def _events(self) -> Iterator[Event]:
        if self._started:
            return self._tail.events()
        self._started = True
        return merge([self._first_events(), self._tail.events()])

    def view(self, now: float | None = None) -> RunView:
        """The run as it is after the last poll."""
        if self.state.attempt != self._facts_of:
            # Nodes are lost, and the record of it is written, between attempts.
            self._facts_of, self.job = self.state.attempt, read_job_facts(self.run)
        return RunView(
            run=self.run,
            job=self.job,
            state=self.state,
            holder=read_holder_leniently(self.run),
            now=time.time() if now is None else now,
            complete=self.complete,
        )

    def _files(self) -> list[Path]:
        """Event files of all attempts that may still grow, i.e. the two newest, and those never read."""
        numbers = self.run.attempt_numbers()
        open_ones = [number for number in numbers if number not in self._settled]
        self._settled.update(numbers[:-2])
        return [path for number in open_ones for path in event_files(self.run.attempt(number))]

    def _first_events(self) -> list[Event]:
        numbers = self.run.attempt_numbers()
        files = {number: event_files(self.run.attempt(number)) for number in numbers}
        total = sum(size_of(path) for paths in files.values() for path in paths)
        if self._whole or total <= WHOLE_BYTES:
            return []
        self.complete = False
        streams: list[Sequence[Event]] = []
        self._settled.update(numbers[:-OLD_ATTEMPTS])
        recent = numbers[-OLD_ATTEMPTS:]
        curve_bytes = sum(size_of(self.run.attempt(number).rank_events(0)) for number in recent)
        for number in recent:
            attempt = self.run.attempt(number)
            newest = number == numbers[-1]
            share = size_of(attempt.rank_events(0)) / max(1, curve_bytes)
            for path in files[number]:
                if path == attempt.rank_events(0):
                    streams.append(self._economical(path, windows=round(CURVE_WINDOWS * share)))
                elif path == attempt.supervisor_events:
                    streams.append(self._economical(path, tail_bytes=SUPERVISOR_BYTES))
                else:
                    share_bytes = min(HEAD_BYTES, RANKS_BYTES // len(files[number])) if newest else 0
                    streams.append(
                        self._economical(
                            path, tail_bytes=share_bytes, head_bytes=min(share_bytes, FIRST_LINE_BYTES)
                        )
                    )
        return list(merge(streams))

    def _economical(
        self, path: Path, *, tail_bytes: int = HEAD_BYTES, windows: int = 0, head_bytes: int = HEAD_BYTES
    ) -> list[Event]:
        """Head and samples of a file; what follows is left to the tail, which starts `tail_bytes` before
        the end."""
        start = size_of(path) - tail_bytes
        if start <= head_bytes and head_bytes:
            return []
        self._tail.start_at(path, max(0, start))
        events = EventTail(path).poll(max_bytes=head_bytes) if head_bytes else []
        if windows:
            events += sample_events(path, end=start, windows=windows, kinds=CURVE_KINDS)
        return events


def event_files(attempt: AttemptDir) -> list[Path]:
    """Event files of an attempt, by name."""
    try:
        return sorted(path for path in attempt.events.iterdir() if path.suffix == ".jsonl")
    except OSError:
        return []


def read_view(run: RunDir, *, now: float | None = None, whole: bool = False) -> RunView:
    """The run as it is now."""
    reader = RunReader(run, whole=whole)
    reader.advance()
    return reader.view(now)


def read_views(runs: Sequence[RunDir]) -> tuple[list[RunView], list[str]]:
    """Views of the runs, and the paths of those that cannot be read."""
    views: list[RunView] = []
    unreadable: list[str] = []
    for run in runs:
        try:
            views.append(read_view(run))
        except RunError:
            unreadable.append(str(run.path))
    return views, unreadable


def read_holder_leniently(run: RunDir) -> LeaseHolder | None:
    """The lease's holder, or None also when the lease cannot be read."""
    try:
        return read_holder(run)
    except (OSError, ValueError, KeyError, TypeError):
        return None
