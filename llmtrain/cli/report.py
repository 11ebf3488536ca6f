"""`llmtrain report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import RUNS, Json, RunName, Runs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(_report)


def _report(
    run: RunName,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write; default: RUN-ID.html.", show_default=False),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Read every event, however many.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Write a run as one HTML page with plots.

    The page needs no network, and no other file.
    """
    from llmtrain.cli.output import write_output
    from llmtrain.observe.html.report import report_page
    from llmtrain.observe.run_reader import read_view
    from llmtrain.run.find import find_run

    found = find_run(run, runs)
    path = out or Path(f"{found.run_id}.html")
    write_output(path, report_page(read_view(found, whole=whole)), option="--out")
    if as_json:
        document = {"run": found.run_id, "path": str(path.absolute()), "bytes": path.stat().st_size}
        console.emit_json(document)
