"""`llmtrain tensorboard`: a run's curves as files that TensorBoard reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import RUNS, Follow, RunName, Runs

POLL_SECONDS = 5.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tensorboard")(_tensorboard)


def _tensorboard(
    run: RunName,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Log folder; the run gets a folder of its own in it.")
    ],
    follow: Follow = False,
    runs: Runs = RUNS,
) -> None:
    """Write a run's curves for TensorBoard.

    All attempts are one run there; steps that were done again are told once.
    """
    from llmtrain.cli.output import unwritable
    from llmtrain.observe.run_reader import RunReader
    from llmtrain.observe.trackers.tensorboard import file_head, records
    from llmtrain.run.find import find_run

    found = find_run(run, runs)
    path = out / found.run_id / "events.out.tfevents.0000000000.llmtrain"
    reader = RunReader(found, whole=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(file_head(reader.job.created or time.time()))
            while True:
                file.writelines(records(reader.poll()))
                file.flush()
                if not follow or reader.view().status.is_over:
                    break
                time.sleep(POLL_SECONDS)
    except OSError as error:
        raise unwritable(path, error, option="--out") from error
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    console.say(f"wrote {path}; look: tensorboard --logdir {out}")
