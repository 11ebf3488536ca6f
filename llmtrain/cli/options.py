"""Options and arguments that several commands share, so that they look the same everywhere."""

from __future__ import annotations

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
