"""`llmtrain profiles`: list, show and check where can be trained."""

from __future__ import annotations

from typing import Annotated

import typer

from llmtrain.cli.options import Json, Overrides
from llmtrain.cli.subcommands import catalogue
from llmtrain.cli.subcommands.calibrate import calibrate

_Name = Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a shipped profile, or a path.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="List, show and check cluster profiles (where to train).", rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_default)
    group.command("list")(_list)
    group.command("show")(_show)
    group.command("check")(_check)
    group.command("calibrate")(calibrate)
    app.add_typer(group, name="profiles")


def _default(context: typer.Context, as_json: Json = False) -> None:
    """List, show and check cluster profiles (where to train). Without a command: list."""
    if context.invoked_subcommand is None:
        catalogue.print_list("cluster_profiles", as_json=as_json)


def _list(as_json: Json = False) -> None:
    """List the shipped cluster profiles."""
    catalogue.print_list("cluster_profiles", as_json=as_json)


def _show(name: _Name, as_json: Json = False) -> None:
    """Show a profile as it stands.

    With --json: all its values, defaults included.
    """
    catalogue.print_one("cluster_profiles", name, as_json=as_json)


def _check(name: _Name, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a cluster profile and report every problem.

    Keys of --set need no `cluster.` here.
    """
    from llmtrain.config.reading.override import parse_overrides, without_prefix

    parsed, problems = parse_overrides(overrides or [])
    found = [*problems, *catalogue.read("cluster_profiles", name, without_prefix(parsed)).problems]
    catalogue.print_check("cluster_profiles", name, found, as_json=as_json)
