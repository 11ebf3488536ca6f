"""`llmtrain recipes`: list, show and check what can be trained."""

from __future__ import annotations

from typing import Annotated

import typer

from llmtrain.cli.options import Json, Overrides
from llmtrain.cli.subcommands import catalogue

_Name = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a path.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="List, show and check recipes (what to train).", rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_default)
    group.command("list")(_list)
    group.command("show")(_show)
    group.command("check")(_check)
    app.add_typer(group, name="recipes")


def _default(context: typer.Context, as_json: Json = False) -> None:
    """List, show and check recipes (what to train). Without a command: list."""
    if context.invoked_subcommand is None:
        catalogue.print_list("recipes", as_json=as_json)


def _list(as_json: Json = False) -> None:
    """List the shipped recipes."""
    catalogue.print_list("recipes", as_json=as_json)


def _show(name: _Name, as_json: Json = False) -> None:
    """Show a recipe as it stands.

    With --json: all its values, defaults included.
    """
    catalogue.print_one("recipes", name, as_json=as_json)


def _check(
    name: _Name,
    cluster: Annotated[
        str, typer.Option(metavar="PROFILE", help="Check it against this cluster profile too.")
    ] = "",
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Check a recipe and report every problem.

    Also a corpus or tokenizer that this machine does not have, unless the profile's runs are elsewhere.
    """
    from llmtrain.cli.inputs import HERE, missing_inputs, missing_of
    from llmtrain.config.job import check
    from llmtrain.config.load import read_profile
    from llmtrain.config.reading.override import parse_overrides, split_overrides

    parsed, problems = parse_overrides(overrides or [])
    if cluster:
        found = check(name, cluster, overrides or [])
        profile = read_profile(cluster, split_overrides(parsed)[1]).value
        if profile is not None and profile.backend.kind in HERE:
            found += missing_inputs(name, overrides or [])
        catalogue.print_check("recipes", name, found, as_json=as_json)
        return
    loaded = catalogue.read("recipes", name, parsed)
    found = [*problems, *loaded.problems, *missing_of(loaded)]
    catalogue.print_check("recipes", name, found, as_json=as_json)
