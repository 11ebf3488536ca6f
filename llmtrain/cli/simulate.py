"""`llmtrain simulate`: weeks of a run with failures, in seconds, with the real detectors and policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import ClusterName, Json, Overrides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmtrain.supervise.simulation.account import Account
    from llmtrain.supervise.simulation.model import Scenario


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(_simulate)


def _simulate(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="Name of a shipped recipe, or a path.")
    ] = "",
    cluster: ClusterName = "local",
    preset: Annotated[
        str,
        typer.Option("--preset", metavar="NAME", help="A published run instead of a recipe: llama3 or opt."),
    ] = "",
    days: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0.01, max=1000, help="How long; default: 30, or as published."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another one draws other failures.")] = 0,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Play weeks of a run with failures, in seconds.

    Nothing is started. The detectors, the policy, the ladder and the checkpoint interval are those of real
    runs; durations and failure rates are assumed, and said.
    """
    from llmtrain.supervise.simulation.simulate import simulate

    scenario = _scenario(recipe, cluster, preset, days, overrides or [])
    account = simulate(scenario, seed)
    if as_json:
        facts = {"scenario": scenario.name, "nodes": scenario.nodes, "spares": scenario.spares, "seed": seed}
        console.emit_json({**facts, **account.document(), "assumptions": list(scenario.assumptions)})
    else:
        console.emit("\n".join(_lines(scenario, account)))


def _scenario(recipe: str, cluster: str, preset: str, days: float | None, overrides: list[str]) -> Scenario:
    from llmtrain.config.job import resolve
    from llmtrain.errors import UsageError
    from llmtrain.plan.make import make_plan
    from llmtrain.supervise.simulation.presets import PRESETS, from_plan

    if bool(recipe) == bool(preset):
        raise UsageError("give a RECIPE or a --preset", hint=f"presets: {', '.join(PRESETS)}")
    if preset and preset not in PRESETS:
        raise UsageError(f"there is no preset `{preset}`", hint=f"known: {', '.join(PRESETS)}")
    if preset and overrides:
        raise UsageError("--set does not go with --preset: its numbers are published ones")
    if preset:
        return PRESETS[preset](days)
    spec = resolve(recipe, cluster, overrides)
    return from_plan(spec, make_plan(spec), days or 30.0)


def _lines(scenario: Scenario, account: Account) -> Iterator[str]:
    from llmtrain.units import format_duration, plural

    told = account.document()
    yield (
        f"{scenario.name}: {plural(scenario.nodes, 'node')}, {scenario.spares} of them spares, "
        f"{told['days']:.1f} days, {plural(account.attempts, 'attempt')}"
    )
    yield f"goodput    {100 * account.goodput:.2f} %"
    for name, seconds in sorted(account.parts.items(), key=lambda part: -part[1]):
        if name != "productive" and seconds > 0:
            yield f"  {100 * seconds / account.total:6.2f} %  {name}"
    yield f"incidents  {_counts(told['incidents'])}"
    for kind, found in told["detection_seconds"].items():
        median, most = format_duration(found["median"]), format_duration(found["max"])
        yield f"  {kind}: found after {median}, at most {most}"
    if told["recovery_seconds"]["median"] is not None:
        median, most = (format_duration(told["recovery_seconds"][key]) for key in ("median", "max"))
        yield f"recovery   {median}, at most {most}, from the failure to the first new step"
    if told["checkpoint_interval_seconds"]:
        yield f"saves      every {format_duration(told['checkpoint_interval_seconds'])}"
    yield f"decisions  {_counts(told['decisions'])}"
    yield f"budget     {account.most_lost} nodes lost at most, {account.losable} may be"
    yield f"wrong      {_counts({name: count for name, count in account.wrong.items() if count}) or 'none'}"
    yield "assumed:"
    for text in scenario.assumptions:
        yield f"  {text}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
