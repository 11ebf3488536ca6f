"""`llmtrain doctor`: would a run work on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from llmtrain.cli import console
from llmtrain.cli.options import Json
from llmtrain.cli.status import Runs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(_doctor)


def _doctor(runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """Find out what would be in the way of a run.

    Looks at this machine and at the folder of runs.
    """
    from llmtrain.observe.doctor import checks_table, diagnose

    diagnosis = diagnose(runs)
    if as_json:
        console.emit_json(diagnosis.document())
    else:
        from llmtrain.observe.terminal import make_console, print_view

        print_view(make_console(), checks_table(diagnosis))
        for check in diagnosis.checks:
            if check.hint:
                console.say(f"{check.name}: {check.hint}")
        console.emit(diagnosis.verdict)
    raise typer.Exit(diagnosis.exit_status)
