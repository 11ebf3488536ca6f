"""`status --watch`: the status view on the whole terminal, redrawn until the run ends."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live

from llmtrain.observe.run_reader import RunReader, RunView
from llmtrain.observe.terminal_views.progress import follow
from llmtrain.observe.terminal_views.screen import screen_of
from llmtrain.observe.terminal_views.status import status_screen
from llmtrain.run.layout import RunDir


def watch(run: RunDir, console: Console, *, interval: float) -> None:
    """Redraw the view every `interval` seconds; leaves the last view on the terminal when the run has ended.

    Where there is no terminal, new events are printed as plain lines instead. KeyboardInterrupt ends it.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        follow(run, console=console, poll_seconds=interval)
        return
    reader = RunReader(run)
    view = _read(reader)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while view.state.ended is None:
            live.update(status_screen(view, screen_of(console, full=True)), refresh=True)
            time.sleep(interval)
            view = _read(reader)
    console.print(status_screen(view, screen_of(console)))


def _read(reader: RunReader) -> RunView:
    reader.advance()
    return reader.view()
