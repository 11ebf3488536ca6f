"""Follow a run until it ends: a live view on a terminal, else plain lines at sensible intervals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live

from llmtrain.errors import ExitStatus
from llmtrain.events.event import Event
from llmtrain.events.moments import describe
from llmtrain.events.schema import (
    AttemptStarted,
    CheckpointCommitted,
    Evaluated,
    PhaseStarted,
    RankFailed,
    RunEnded,
    StepFinished,
)
from llmtrain.observe.goodput_text import goodput_text
from llmtrain.observe.run_reader import RunReader, RunView
from llmtrain.observe.terminal_views.screen import screen_of
from llmtrain.observe.terminal_views.status import status_screen
from llmtrain.observe.wording import (
    STYLES,
    bytes_text,
    count_text,
    duration_text,
    layout_text,
    loss_text,
    small_text,
)
from llmtrain.run.layout import RunDir

POLL_SECONDS = 0.5
LINE_SECONDS = 10.0
"""Time between two step lines where there is no terminal."""
GRACE_SECONDS = 30.0
"""How long a run may wait for its first supervisor."""
QUIET_PHASES = ("step", "evaluate", "checkpoint")
"""Phases that come again and again; the others are told as they begin."""


class Display(Protocol):
    """Shows a run while it is followed."""

    def show(self, view: RunView, events: Sequence[Event]) -> None:
        """Take the newest view, and the events since the one before."""
        ...


def follow(
    run: RunDir,
    *,
    console: Console,
    since: float = 0.0,
    is_alive: Callable[[], bool] | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> int:
    """Show a run until it ends, and return its exit code (`ExitStatus`).

    An ending before `since` (epoch seconds) does not count: a resumed run still holds its last one.
    `is_alive` tells whether the supervisor runs, where the caller knows it better than the lease. When the
    supervisor is gone without a word, the exit code is that of record.json, else FAILED. KeyboardInterrupt
    is left to the caller.
    """
    if not console.is_terminal or console.is_dumb_terminal:  # which cannot redraw in place
        status = _follow(run, Plain(console, since), since, is_alive, poll_seconds)
    else:
        with Live(console=console, auto_refresh=False) as live:
            status = _follow(run, OnTerminal(live, since), since, is_alive, poll_seconds)
    if status is not None:
        return status
    status, message = recorded_end(run)
    if message:  # No event has told it.
        console.print(message, markup=False, highlight=False, soft_wrap=True)
    return status


def _follow(
    run: RunDir,
    display: Display,
    since: float,
    is_alive: Callable[[], bool] | None,
    poll_seconds: float,
) -> int | None:
    """The exit code that the run's last event tells; None when the supervisor is gone without a word."""
    reader = RunReader(run)
    patience, alone = GRACE_SECONDS, 0.0
    while True:
        # Asked before reading, so that the last words of a supervisor that is gone are still read.
        supervised = is_alive() if is_alive else reader.view().is_supervised
        events = reader.poll()
        view = reader.view()
        display.show(view, events)
        ended = view.state.ended
        if ended is not None and ended.time >= since:
            return ended.exit_status
        if supervised:
            patience, alone = 2 * poll_seconds, 0.0
        elif alone > patience:
            return None
        else:
            alone += poll_seconds
        time.sleep(poll_seconds)


def recorded_end(run: RunDir) -> tuple[int, str]:
    """Exit code and message in record.json; FAILED and nothing when it holds none."""
    try:
        record = json.loads(run.record_json.read_text(encoding="utf-8"))
        status, message = record.get("exit_status"), record.get("message")
    except (OSError, ValueError, AttributeError):
        status = message = None
    return (
        status if type(status) is int else int(ExitStatus.FAILED),
        message if isinstance(message, str) else "",
    )


class OnTerminal:
    """The status view, redrawn in place; what is worth a sentence scrolls by above it."""

    def __init__(self, live: Live, since: float) -> None:
        self._live, self._since = live, since
        self._sentences = Sentences()

    def show(self, view: RunView, events: Sequence[Event]) -> None:
        """Redraw."""
        console = self._live.console
        for event in events:
            moment = describe(event)
            if moment is not None and moment.level != "info" and event.time >= self._since:
                text = f"{clock(event.time)}  {self._sentences.told(event, moment.text)}"
                console.print(text, style=STYLES.get(moment.level, ""))
        screen = screen_of(console, full=True)
        self._live.update(status_screen(view, screen), refresh=True)


class Plain:
    """One line for everything worth a sentence, and a step line every LINE_SECONDS."""

    def __init__(self, console: Console, since: float = 0.0, line_seconds: float = LINE_SECONDS) -> None:
        self._console, self._since, self._line_seconds = console, since, line_seconds
        self._next_line = 0.0
        self._told_run = False
        self._sentences = Sentences()

    def show(self, view: RunView, events: Sequence[Event]) -> None:
        """Print what is new."""
        if not self._told_run:
            self._told_run = True
            what = f"{view.job.recipe} on {view.job.cluster}, {view.job.steps} steps"
            self._console.print(f"run {view.run.run_id}: {what}")
            self._console.print(f"layout {layout_text(view.job.layout)}")
        for event in events:
            if event.time >= self._since:
                for line in self._lines(view, event):
                    self._console.print(f"{clock(event.time)}  {line}", soft_wrap=True)

    def _lines(self, view: RunView, event: Event) -> Iterator[str]:
        moment = describe(event)
        if moment is not None:
            head = self._sentences.told(event, moment.text)
            yield head if moment.level == "info" else f"{moment.level}: {head}"
        match event.payload:
            case StepFinished() as step:
                if event.time >= self._next_line or step.step == view.state.total_steps:
                    self._next_line = event.time + self._line_seconds
                    yield step_line(view, step)
            case Evaluated(step=number, loss=loss):
                yield f"validation loss {loss_text(loss)} after step {number}"
            case CheckpointCommitted(name=name, bytes=size, seconds=seconds):
                yield f"checkpoint {name}, {bytes_text(size)} in {duration_text(seconds)}"
            case RunEnded():
                split = goodput_text(view)
                if split:
                    yield f"goodput {split}"
            case PhaseStarted(phase=phase) if event.rank == 0 and phase not in QUIET_PHASES:
                yield f"rank 0: {phase}"


def step_line(view: RunView, step: StepFinished) -> str:
    """`step 84/200  loss 2.9312  gradient norm 0.82  learning rate 2.9e-04  12.3 k tokens/s  eta 2 min 10
    s`."""
    total = view.state.total_steps
    parts = [
        f"step {step.step}/{total}" if total else f"step {step.step}",
        f"loss {loss_text(step.loss)}",
        f"gradient norm {small_text(step.grad_norm)}",
        f"learning rate {small_text(step.learning_rate)}",
        f"{count_text(step.tokens_per_second)} tokens/s",
    ]
    pace = view.state.seconds_per_step
    if total and pace is not None and step.step < total:
        parts.append(f"eta {duration_text((total - step.step) * pace)}")
    return "  ".join(parts)


class Sentences:
    """What is said of events, so that an error which all ranks meet is not spelt out again and again."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def told(self, event: Event, text: str) -> str:
        """An error's first line, since the rest is in the logs; but all of how the run ended and what to
        do."""
        if isinstance(event.payload, RunEnded):
            return text
        if isinstance(event.payload, AttemptStarted):
            self._errors.clear()
        line = text.partition("\n")[0]
        for error in self._errors:
            line = line.replace(error, "the same error")
        if isinstance(event.payload, RankFailed):
            error = event.payload.error.partition("\n")[0]
            if error and error not in self._errors:
                self._errors.append(error)
        return line


def clock(when: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(when))
