"""`llmtrain metrics`: Prometheus metrics of runs, over HTTP or as a text file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.status import Runs
from llmtrain.errors import UsageError

PORT = 9477


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("metrics")(_metrics)


def _metrics(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Only this run; default: all of --runs.", show_default=False),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help=f"Answer scrapes, e.g. 127.0.0.1:{PORT}.", show_default=False),
    ] = None,
    text_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep a file for node_exporter instead.", show_default=False),
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Time between two writes of --text-file.")
    ] = 15.0,
    runs: Runs = Path("runs"),
) -> None:
    """Export metrics of runs to Prometheus; without --listen and --text-file print them once."""
    from llmtrain.observe.exporter import Exporter, exposition, serve, write_text_file
    from llmtrain.run.find import find_run, list_runs

    if listen and text_file:
        raise UsageError("--listen and --text-file exclude each other", where="--listen")
    chosen = find_run(run, runs) if run is not None else None
    exporter = Exporter(lambda: list_runs(runs) if chosen is None else [chosen])
    try:
        if listen:
            url, stop = serve(exporter, *_address(listen))
            console.say(f"metrics at {url}; Ctrl-C ends it")
            try:
                while True:
                    time.sleep(3600)
            finally:
                stop()
        while text_file:
            write_text_file(exporter, text_file)
            time.sleep(interval)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    console.emit(exposition(exporter).decode().removesuffix("\n"))


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        hint = f"write HOST:PORT, e.g. 127.0.0.1:{PORT}"
        raise UsageError(f"{listen!r} is no address", where="--listen", hint=hint)
    return host.strip("[]") or "127.0.0.1", int(port)
