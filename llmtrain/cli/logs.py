"""`llmtrain logs`: what ranks, agents and the supervisor printed."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.forward import forwarded
from llmtrain.cli.options import RUNS, Follow, Json, RunName, Runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmtrain.observe.logs import LogFile
    from llmtrain.run.layout import RunDir


FOLLOWED_LINES = 10
"""Last lines of each file that --follow begins with."""

_Lines = Annotated[
    int | None,
    typer.Option(
        "--lines",
        "-n",
        metavar="N",
        min=0,
        help=f"Only the last N lines of each file; default: all, with --follow {FOLLOWED_LINES}.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("logs")(_logs)


def _logs(
    run: RunName,
    rank: Annotated[
        int | None, typer.Option(metavar="R", min=0, help="Only this rank.", show_default=False)
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="This attempt; default: the newest.", show_default=False),
    ] = None,
    follow: Follow = False,
    lines: _Lines = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Lines as they were printed.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Print and follow the logs of a run.

    Without --rank each line stands after the name of who wrote it.
    """
    from llmtrain.errors import UsageError
    from llmtrain.observe.logs import log_files
    from llmtrain.run.find import find_run

    if follow and as_json:
        hint = "leave one out; lines that come need --follow alone"
        raise UsageError("--follow and --json exclude each other", where="--follow", hint=hint)
    found = find_run(run, runs)
    if (code := forwarded(found, run)) is not None:
        raise typer.Exit(code)
    prefix = not no_prefix and rank is None
    listing = partial(log_files, found, rank=rank, attempt=attempt)
    if as_json:
        _emit_document(found, listing(), lines)
    elif follow:
        _follow(found, listing, FOLLOWED_LINES if lines is None else lines, prefix=prefix)
    else:
        _emit_lines(found, listing(), lines, prefix=prefix)


def _follow(run: RunDir, listing: Callable[[], Sequence[LogFile]], lines: int, *, prefix: bool) -> None:
    """Print lines as they come until the run is over. `listing` names the files: new attempts bring new
    ones."""
    from llmtrain.observe.logs import follow_logs, run_over

    try:
        for line in follow_logs(listing, lines=lines, prefix=prefix, ended=run_over(run)):
            console.emit(line)
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _emit_lines(run: RunDir, files: Sequence[LogFile], lines: int | None, *, prefix: bool) -> None:
    from llmtrain.observe.logs import read_logs

    silent = True
    for line in read_logs(files, lines=lines, prefix=prefix):
        console.emit(line)
        silent = False
    if silent and lines != 0:  # Of a healthy run this is all: steps are events.
        folders = ", ".join(
            dict.fromkeys(str(file.path.parent) for file in files if file.attempt is not None)
        )
        where = f"the logs in {folders} are empty" if folders else "no attempt has started"
        console.say(f"nothing was printed: {where}; what it did: llmtrain status {run.argument}")


def _emit_document(run: RunDir, files: Sequence[LogFile], lines: int | None) -> None:
    """The same lines as one object; `attempt` is null for the supervisor, who outlives attempts."""
    from llmtrain.observe.logs import log_lines

    told = [
        {"source": file.label, "attempt": file.attempt, "text": text}
        for file, text in log_lines(files, lines)
    ]
    console.emit_json({"run": run.run_id, "lines": told})
