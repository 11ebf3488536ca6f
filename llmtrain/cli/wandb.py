"""`llmtrain wandb`: a run's curves for Weights & Biases, offline unless asked otherwise."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.options import RUNS, Follow, Json, RunName, Runs

if TYPE_CHECKING:
    from llmtrain.run.layout import RunDir

POLL_SECONDS = 5.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("wandb")(_wandb)


def _wandb(
    run: RunName,
    project: Annotated[str, typer.Option(metavar="NAME", help="Project at Weights & Biases.")] = "llmtrain",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Its files go to DIR/wandb.")] = Path(),
    online: Annotated[bool, typer.Option("--online", help="Send at once; default: write files.")] = False,
    follow: Follow = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Tell Weights & Biases a run's curves.

    All attempts are one run there; steps that were done again are told once.
    """
    from llmtrain.cli.output import unwritable
    from llmtrain.errors import UsageError
    from llmtrain.run.find import find_run

    found = find_run(run, runs)
    try:
        told = _tell(found, project=project, out=out, online=online, follow=follow)
    except ImportError as error:
        hint = "pip install 'llmtrain[wandb]'"
        raise UsageError(f"Weights & Biases is not installed: {error}", where="wandb", hint=hint) from error
    except OSError as error:
        raise unwritable(out / "wandb", error, option="--out") from error
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    if as_json:
        kept = None if online else str((out / "wandb").absolute())
        console.emit_json({"run": found.run_id, "path": str(found.path), "told": told, "files": kept})
        return
    where = "" if online else f"; send them: wandb sync {out}/wandb/offline-run-*"
    console.say(f"told {told} steps{where}")


def _tell(run: RunDir, *, project: str, out: Path, online: bool, follow: bool) -> int:
    """Number of steps told by this call."""
    from llmtrain.observe.run_reader import RunReader
    from llmtrain.observe.trackers.tracker import rows

    mark = out / "wandb" / f"{run.run_id}.told.json"
    reader, count = RunReader(run, whole=True), 0
    last = _last_told(mark)
    client = _client(run, project, out, online=online)
    try:
        while True:
            for row in rows(reader.poll(), last):
                client.log(row.values, step=row.step)
                count, last = count + (row.step > last), row.step
            _remember(mark, last)
            if not follow or reader.view().status.is_over:
                return count
            time.sleep(POLL_SECONDS)
    finally:
        client.finish()


def _client(run: RunDir, project: str, out: Path, *, online: bool) -> Any:
    """Weights & Biases' own object for this run. Its id is the run's, so that all attempts, and all calls of
    this command, make one run there. Raises ImportError and OSError."""
    import wandb

    out.mkdir(parents=True, exist_ok=True)
    spec = json.loads(run.job_json.read_text(encoding="utf-8"))
    return wandb.init(
        project=project,
        id=run.run_id,
        name=run.run_id,
        resume="allow",
        mode="online" if online else "offline",
        dir=out,
        config={"recipe": spec.get("spec", {}).get("recipe"), "layout": spec.get("layout")},
        settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True),
    )


def _last_told(mark: Path) -> int:
    try:
        step = json.loads(mark.read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return step if isinstance(step, int) else 0


def _remember(mark: Path, step: int) -> None:
    from llmtrain.run.atomic import write_json

    write_json(mark, {"step": step})
