"""From a run's folder to its state, incrementally, at a cost that does not grow with the length of the
run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import Any

from llmtrain.errors import RunError
from llmtrain.events.event import Event
from llmtrain.events.reader import EventTail, FolderTail, merge, sample_events, size_of
from llmtrain.events.run_state import RunState
from llmtrain.events.state import fold
from llmtrain.parallel_dims import AXES
from llmtrain.run.layout import AttemptDir, RunDir
from llmtrain.run.lease import LeaseHolder, read_holder

WHOLE_BYTES = 1 << 19
"""Up to so many bytes of events are read whole; bigger runs are read at their ends and sampled in between."""
CURVE_WINDOWS = 256
CURVE_KINDS = ("step_finished", "evaluated", "checkpoint_committed")
HEAD_BYTES = 4096
RANKS_BYTES = 1 << 18
"""Bytes read over all ranks of the newest attempt but rank 0."""
SUPERVISOR_BYTES = 1 << 16
OLD_ATTEMPTS = 64
"""Newest attempts whose events are looked at in a big run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a view needs of `job.json`; read leniently, so that a run of a newer version can be looked at."""

    recipe: str = ""
    cluster: str = ""
    backend: str = ""
    steps: int | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    sequence: int | None = None
    created: float | None = None
    nodes_lost: int | None = None
    """Distinct nodes lost so far, from record.json."""
    nodes_lost_allowed: int | None = None
    """More lost nodes end the run."""

    @property
    def world_size(self) -> int | None:
        """Ranks of the planned layout; None when the job file does not tell."""
        degrees = [self.layout.get(axis) for axis in AXES]
        return prod(degree for degree in degrees if isinstance(degree, int)) if any(degrees) else None


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
    def status(self) -> str:
        """The state's word, or `interrupted` when the run goes on according to its events but nobody is in
        charge, or `created` before anybody was."""
        word = self.state.status
        if word in ("finished", "stopped", "failed") or self.is_supervised:
            return word
        if self.holder is None and not self.state.attempts:
            return "created"
        return "interrupted"

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
        self._settled: set[int] = set()
        self._tail = FolderTail(self._files)

    def poll(self) -> list[Event]:
        """New events in order of time; `state` holds them already."""
        events = list(self._events())
        self.state = fold(events, self.state)
        return events

    def advance(self) -> RunState:
        """The same as `poll` for who needs the state only; holds no event in memory."""
        self.state = fold(self._events(), self.state)
        return self.state

    def _events(self) -> Iterator[Event]:
        if self._started:
            return self._tail.events()
        self._started = True
        return merge([self._first_events(), self._tail.events()])

    def view(self, now: float | None = None) -> RunView:
        """The run as it is after the last poll."""
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
                    tail_bytes = min(HEAD_BYTES, RANKS_BYTES // len(files[number])) if newest else 0
                    streams.append(self._economical(path, tail_bytes=tail_bytes, head=newest))
        return list(merge(streams))

    def _economical(
        self, path: Path, *, tail_bytes: int = HEAD_BYTES, windows: int = 0, head: bool = True
    ) -> list[Event]:
        """Head and samples of a file; what follows is left to the tail, which starts `tail_bytes` before
        the end."""
        start = size_of(path) - tail_bytes
        if start <= HEAD_BYTES and head:
            return []
        self._tail.start_at(path, max(0, start))
        events = EventTail(path).poll(max_bytes=HEAD_BYTES) if head else []
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


def read_job_facts(run: RunDir) -> JobFacts:
    """What views need of `job.json`. Raises RunError when it cannot be read at all."""
    try:
        raw = json.loads(run.job_json.read_text(encoding="utf-8"))
        created = run.job_json.stat().st_mtime
    except (OSError, ValueError) as error:
        raise RunError(f"job.json cannot be read: {error}", where=str(run.job_json)) from error
    recipe, cluster = _at(raw, "spec", "recipe"), _at(raw, "spec", "cluster")
    return JobFacts(
        recipe=_typed(_at(recipe, "name"), str) or "",
        cluster=_typed(_at(cluster, "name"), str) or "",
        backend=_typed(_at(cluster, "backend", "kind"), str) or "",
        steps=_typed(_at(recipe, "train", "steps"), int),
        layout=_typed(_at(raw, "layout"), dict) or {},
        global_batch=_typed(_at(recipe, "batch", "global"), int),
        sequence=_typed(_at(recipe, "model", "sequence"), int),
        created=created,
        nodes_lost=_nodes_lost(run),
        nodes_lost_allowed=_nodes_lost_allowed(recipe, cluster),
    )


def _nodes_lost(run: RunDir) -> int | None:
    try:
        lost = json.loads(run.record_json.read_text(encoding="utf-8")).get("lost_nodes")
    except (OSError, ValueError, AttributeError):
        return None
    return len(lost) if isinstance(lost, list) else None


def _nodes_lost_allowed(recipe: Any, cluster: Any) -> int | None:
    """The plan's rule: at least ceil((1 - budget) x nodes) stay."""
    nodes, budget = _at(cluster, "nodes"), _at(recipe, "faults", "node_loss_budget")
    if type(nodes) is not int or not isinstance(budget, int | float):
        return None
    return nodes - ceil((1 - budget) * nodes - 1e-9)


def read_holder_leniently(run: RunDir) -> LeaseHolder | None:
    """The lease's holder, or None also when the lease cannot be read."""
    try:
        return read_holder(run)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _typed(value: Any, kind: type) -> Any:
    return value if type(value) is kind else None
