"""`llmtrain status`: what a run is doing, or all runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.forward import forwarded
from llmtrain.cli.options import RUNS, Json, Runs
from llmtrain.errors import LlmtrainError, UsageError

if TYPE_CHECKING:
    from llmtrain.run.layout import RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(_status)


_OptionalRun = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Run id, its beginning, or the path of a run directory. Without it: list all runs.",
        show_default=False,
    ),
]


def _status(
    run: _OptionalRun = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until the run ends.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Time between two looks of --watch.")
    ] = 1.0,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show what a run is doing; without RUN, list runs.

    Step, loss, speed, ranks, attempts, checkpoint.
    """
    if watch and as_json:
        raise UsageError("--watch and --json exclude each other", where="--watch", hint="poll with --json")
    if run is None:
        if watch:
            raise UsageError("--watch needs a run", where="RUN", hint="llmtrain status RUN --watch")
        _list(runs, as_json=as_json)
        return
    from llmtrain.run.find import find_run

    found = find_run(run, runs)
    if (code := forwarded(found, run)) is not None:
        raise typer.Exit(code)
    if as_json:
        _emit_document(found)
    elif watch:
        _watch(found, interval)
    else:
        _print(found)


def _emit_document(run: RunDir) -> None:
    from llmtrain.observe.document import status_document
    from llmtrain.observe.run_reader import read_view

    console.emit_json({**status_document(read_view(run)), **_job(run)})


def _watch(run: RunDir, interval: float) -> None:
    from llmtrain.observe.terminal_views.screen import make_console
    from llmtrain.observe.terminal_views.watch import watch

    try:
        watch(run, make_console(), interval=interval)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _print(run: RunDir) -> None:
    from llmtrain.observe.run_reader import read_view
    from llmtrain.observe.terminal_views.screen import make_console, print_view, screen_of
    from llmtrain.observe.terminal_views.status import status_screen

    terminal = make_console()
    print_view(terminal, status_screen(read_view(run), screen_of(terminal)))
    _say_job(run)


def _job(run: RunDir) -> dict[str, Any]:
    """The scheduler's job of a run, for `--json`; nothing where runs have none."""
    if not run.submission_json.exists():
        return {}
    from llmtrain.cli.job import job_document, job_of

    try:
        found = job_of(run)
    except LlmtrainError as error:
        return {"job": {"state": "unknown", "reason": str(error)}}
    return {"job": None if found is None else job_document(*found)}


def _say_job(run: RunDir) -> None:
    """What the scheduler says about a run's job, on standard error."""
    if not run.submission_json.exists():
        return
    from llmtrain.cli.job import job_of, job_text

    try:
        found = job_of(run)
    except LlmtrainError as error:
        console.say_problems(error.problems, word="warning")
        return
    if found is not None:
        console.say(job_text(*found))


def _list(runs: Path, *, as_json: bool) -> None:
    from llmtrain.run.find import list_runs

    found = list_runs(runs)
    if not found and not as_json:
        console.say(f"no run below {runs}/; start one with: llmtrain launch tiny")
        return
    from llmtrain.observe.run_reader import read_views

    views, unreadable = read_views(found)
    if as_json:
        from llmtrain.observe.document import runs_document

        console.emit_json(runs_document(views, unreadable))
        return
    from llmtrain.observe.terminal_views.run_list import runs_table
    from llmtrain.observe.terminal_views.screen import make_console, print_view

    print_view(make_console(), runs_table(views))
    for path in unreadable:
        console.say(f"cannot read {path}")
