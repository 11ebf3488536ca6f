"""`llmtrain dashboards`: alert rules for Prometheus and a dashboard for Grafana, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FILES = ("prometheus-rules.yaml", "prometheus-scrape.yaml", "grafana-dashboard.json")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("dashboards")(_dashboards)


def _dashboards(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; files there are kept.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write files for Prometheus and Grafana.

    Alert rules and a scrape job for the one, a dashboard for the other.
    """
    from llmtrain.cli.output import write_output
    from llmtrain.errors import UsageError
    from llmtrain.resources import shipped_folder

    there = [name for name in FILES if (out / name).exists()]
    if there and not force:
        names = ", ".join(there)
        raise UsageError(f"{out} has {names} already", where="--out", hint="give --force to replace them")
    for name in FILES:
        write_output(out / name, (shipped_folder("templates") / name).read_bytes(), option="--out")
