"""`llmtrain plan`: how a recipe would run on a cluster, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.options import ClusterName, Json, Overrides, RecipeName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmtrain.config.job import JobSpec
    from llmtrain.plan.plan import Candidate, Plan

    Counted = list[dict[str, Any]]


_Nodes = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Plan for so many nodes; default: the profile's.")
]
_FixedLayout = Annotated[
    str | None,
    typer.Option("--layout", metavar="dp=8,tp=8,...", help="Evaluate this one layout instead of searching."),
]
_Top = Annotated[int, typer.Option(metavar="K", min=1, max=1000, help="How many plans to show.")]
_Why = Annotated[
    bool,
    typer.Option("--why", help="Explain: the step as a sum, the runner-up, what was refused and why."),
]
_Verify = Annotated[
    bool, typer.Option("--verify", help="Count the engine's real model and compare with the prediction.")
]
_WhatIf = Annotated[
    str | None,
    typer.Option(metavar="'K=V ...'", help="Compare with changed settings, e.g. 'nodes=30 micro=2'."),
]
_Against = Annotated[
    str | None, typer.Option(metavar="dp=8,tp=8,...", help="Compare plan 1 with this layout.")
]
_Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Draw plan 1: nodes, stages, memory, schedule."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(_plan)


def _plan(
    recipe: RecipeName,
    cluster: ClusterName = "local",
    nodes: _Nodes = None,
    layout: _FixedLayout = None,
    top: _Top = 5,
    why: _Why = False,
    verify: _Verify = False,
    what_if: _WhatIf = None,
    against: _Against = None,
    html: _Html = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Plan a run: layout, memory, speed.

    Also what is left of it when nodes are lost. Nothing is started.
    """
    from llmtrain.config.job import resolve
    from llmtrain.config.layout_text import parse_layout
    from llmtrain.plan.make import make_plan

    spec = resolve(recipe, cluster, overrides or [])
    chosen = parse_layout(layout, spec.recipe) if layout is not None else None
    plan = make_plan(spec, layout=chosen, nodes=nodes, top=top)
    others = _others(recipe, cluster, overrides or [], what_if=what_if, against=against)
    counted = _verify(spec, plan) if verify else None
    if html is not None:
        _draw(html, spec, plan, nodes or spec.cluster.nodes)
    if as_json:
        console.emit_json(_document(plan, counted, others))
    else:
        paragraphs = _paragraphs(spec, plan, nodes or spec.cluster.nodes, counted, others, why=why)
        console.emit("\n\n".join(paragraphs))
    console.say_problems(plan.problems, word="warning")


def _draw(path: Path, spec: JobSpec, plan: Plan, nodes: int) -> None:
    from llmtrain.cli.output import write_output
    from llmtrain.observe.html.plan_page import plan_page

    write_output(path, plan_page(spec, plan, nodes), option="--html")


def _document(plan: Plan, counted: Counted | None, others: Sequence[tuple[str, Candidate]]) -> dict[str, Any]:
    from llmtrain.plan.document import candidate_document, plan_document

    document = plan_document(plan)
    if counted is not None:
        document["verified"] = counted
    if others:
        document["compared"] = [candidate_document(other) for _, other in others]
    return document


def _paragraphs(
    spec: JobSpec,
    plan: Plan,
    nodes: int,
    counted: Counted | None,
    others: Sequence[tuple[str, Candidate]],
    *,
    why: bool,
) -> Iterator[str]:
    from llmtrain.cli.plan_views.summary import plan_text
    from llmtrain.cli.plan_views.why import comparison_text

    yield plan_text(spec, plan, nodes)
    if why:
        yield _why(spec, plan)
    if counted is not None:
        from llmtrain.cli.plan_views.verify import verify_text

        yield verify_text(counted)
    for name, other in others:
        yield comparison_text(plan.plans[0], other, ("plan 1", name))


def _verify(spec: JobSpec, plan: Plan) -> Counted:
    from llmtrain.cli.plan_views.verify import verify

    return verify(spec, plan.plans[0])


def _why(spec: JobSpec, plan: Plan) -> str:
    from llmtrain.cli.plan_views.why import lost_work_text, why_text
    from llmtrain.plan.compare import plain_settings
    from llmtrain.plan.make import make_evaluator

    text = why_text(plan, plain_settings(make_evaluator(spec), plan.plans[0]))
    # Of more nodes the plan itself tells it, beside how often they fail.
    return text if spec.cluster.nodes > 1 else f"{text}\n\n{lost_work_text(plan)}"


def _others(
    recipe: str, cluster: str, overrides: list[str], *, what_if: str | None, against: str | None
) -> list[tuple[str, Candidate]]:
    """Candidates to compare plan 1 with, and their names."""
    from llmtrain.config.job import resolve
    from llmtrain.config.layout_text import parse_layout
    from llmtrain.plan.make import make_plan
    from llmtrain.plan.what_if import what_if_overrides

    found = []
    if what_if is not None:
        changed = resolve(recipe, cluster, [*overrides, *what_if_overrides(what_if)])
        found.append((what_if, make_plan(changed).plans[0]))
    if against is not None:
        spec = resolve(recipe, cluster, overrides)
        found.append((against, make_plan(spec, layout=parse_layout(against, spec.recipe)).plans[0]))
    return found
