"""Options and arguments that several commands share, so that they look the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
"""`--json` of every read command."""

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, e.g. batch.micro=2 or cluster.nodes=4; repeatable.",
    ),
]
"""`--set a.b=c`."""

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a path.")]
"""The recipe of `plan` and `launch`."""

ClusterName = Annotated[
    str, typer.Option("--cluster", metavar="PROFILE", help="Name of a shipped cluster profile, or a path.")
]
"""`--cluster` of `plan` and `launch`."""

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id, its beginning, or the path of a run directory.")
]
"""The run of all commands about one."""

Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of run directories.")]
"""`--runs` of the commands that take a run id."""

RUNS = Path("runs")
"""Where runs are looked for unless `--runs` says otherwise."""

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")]
"""`--follow` of `logs` and of the experiment trackers."""

RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="The run's folder; default: a new one below the storage path."
    ),
]
"""`--run-dir` of the commands that make a run."""
