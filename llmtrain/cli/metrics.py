"""`llmtrain metrics`: Prometheus metrics of runs, over HTTP or as a text file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import RUNS, Runs
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.observe.exporter import Exporter

PORT = 9477
LAST_PORT = 65535


_OptionalRun = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Only this run; default: all of --runs.", show_default=False),
]
_Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help=f"Answer scrapes, e.g. 127.0.0.1:{PORT}.", show_default=False),
]
_TextFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep a file for node_exporter.", show_default=False)
]
_Interval = Annotated[
    float, typer.Option(metavar="SECONDS", min=1.0, help="Time between two writes of --text-file.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("metrics")(_metrics)


def _metrics(
    run: _OptionalRun = None,
    listen: _Listen = None,
    text_file: _TextFile = None,
    interval: _Interval = 15.0,
    runs: Runs = RUNS,
    outlive: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Export metrics of runs to Prometheus.

    Without --listen and --text-file they are printed once.
    """
    from llmtrain.observe.exporter import Exporter, exposition, serve
    from llmtrain.run.find import find_run, list_runs

    chosen = find_run(run, runs) if run is not None else None
    exporter = Exporter(lambda: list_runs(runs) if chosen is None else [chosen])
    if not listen and not text_file:
        console.emit(exposition(exporter).decode().removesuffix("\n"))
        return
    if text_file and outlive is None:  # Beside a supervisor the folder is made, and a full disk waited for.
        _refuse_unwritable(text_file)
    leave = threading.Event() if outlive is None else _when_input_ends(outlive)
    stop: Callable[[], None] | None = None
    try:
        if listen:
            url, stop = serve(exporter, *_address(listen))
            console.say(f"metrics at {url}" + ("; Ctrl-C ends it" if outlive is None else ""))
        _keep(exporter, text_file, interval, leave)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        if stop is not None:
            stop()


def _refuse_unwritable(file: Path) -> None:
    """Raise UsageError for a file that can never be written: better told at once than every few seconds."""
    if file.is_dir():
        raise UsageError(f"{file} is a folder", where="--text-file", hint="name the file in it")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", where="--text-file", hint="make it first")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise UsageError(f"the folder {file.parent} cannot be written", where="--text-file")


def _keep(exporter: Exporter, text_file: Path | None, interval: float, leave: threading.Event) -> None:
    """Write the text file again and again, and once more at the end; a disk that is full may have room
    later."""
    from llmtrain.observe.exporter import write_text_file

    failed = ""
    while True:
        is_last = leave.wait(0)
        if text_file:
            try:
                write_text_file(exporter, text_file)
                failed = ""
            except OSError as error:
                if failed != str(error):
                    console.say(f"cannot write {text_file}: {error.strerror}")
                failed = str(error)
        if is_last:
            return
        leave.wait(interval)


def _when_input_ends(seconds: float) -> threading.Event:
    """Set so long after the end of standard input, which is that of the supervisor. Takes the processor only
    when nobody else wants it."""
    over = threading.Event()

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        time.sleep(seconds)
        over.set()

    os.nice(10)
    threading.Thread(target=wait, name="end-of-supervisor", daemon=True).start()
    return over


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    hint = f"write HOST:PORT, e.g. 127.0.0.1:{PORT}"
    if not (port.isascii() and port.isdigit()):
        raise UsageError(f"{listen!r} is no address", where="--listen", hint=hint)
    if int(port) > LAST_PORT:
        raise UsageError(f"port {port} is out of range: 0 to {LAST_PORT}", where="--listen", hint=hint)
    return host.strip("[]") or "127.0.0.1", int(port)
