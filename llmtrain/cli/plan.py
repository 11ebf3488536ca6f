"""`llmtrain plan`: how a recipe would run on a cluster, before anything is started."""

from __future__ import annotations

from typing import Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import ClusterName, Json, Overrides, RecipeName


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(_plan)


def _plan(
    recipe: RecipeName,
    cluster: ClusterName = "local",
    nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Plan for so many nodes; default: the profile's.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="dp=8,tp=8,...", help="Evaluate this one layout instead of searching."),
    ] = None,
    top: Annotated[int, typer.Option(metavar="K", min=1, max=1000, help="How many plans to show.")] = 5,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Plan a run: layout, memory, speed.

    Also what is left of it when nodes are lost. Nothing is started.
    """
    from llmtrain.config.job import resolve
    from llmtrain.config.layout_text import parse_layout
    from llmtrain.plan.document import plan_document
    from llmtrain.plan.make import make_plan

    spec = resolve(recipe, cluster, overrides or [])
    chosen = parse_layout(layout, spec.recipe) if layout is not None else None
    plan = make_plan(spec, layout=chosen, nodes=nodes, top=top)
    if as_json:
        console.emit_json(plan_document(plan))
    else:
        from llmtrain.cli.plan_text import plan_text

        console.emit(plan_text(spec, plan, nodes or spec.cluster.nodes))
    console.say_problems(plan.problems, word="warning")
