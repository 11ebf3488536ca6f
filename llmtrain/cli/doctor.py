"""`llmtrain doctor`: would a run work on this machine, or on the nodes of a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.options import Json, Overrides
from llmtrain.cli.profile_lines import profile_lines
from llmtrain.resources import user_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.config.cluster import ClusterProfile
    from llmtrain.errors import Problem


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(_doctor)


def _doctor(
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="PROFILE",
            help="Look at all nodes of a cluster, and test them against each other.",
        ),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="With --cluster: only ask the nodes; load and measure nothing.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", metavar="DIR", help="Folder of run directories; default: runs, or the profile's."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Find out what would be in the way of a run.

    Looks at this machine and at the folder of runs. With --cluster: at every node, and measures matrix
    products and the links between pairs of nodes, so that a slow node is named. What is found is remembered:
    later runs use convicted nodes last.
    """
    if cluster:
        runs = _whole_cluster(cluster, overrides or [], runs, quick=quick, as_json=as_json)
    from llmtrain.observe.doctor import checks_table, diagnose

    diagnosis = diagnose(runs or Path("runs"))
    if as_json:
        console.emit_json(diagnosis.document())
    else:
        hints = [f"{check.name}: {check.hint}" for check in diagnosis.checks if check.hint]
        _show(checks_table(diagnosis), hints, diagnosis.verdict)
    raise typer.Exit(diagnosis.exit_status)


def _whole_cluster(
    cluster: str, overrides: Sequence[str], runs: Path | None, *, quick: bool, as_json: bool
) -> Path:
    """Look at all nodes and leave; of a cluster that is this machine, the folder of its runs."""
    from llmtrain.backends.registry import load_backend
    from llmtrain.config.load import load_profile
    from llmtrain.observe.cluster_doctor import diagnose_cluster, verdicts_table

    profile = load_profile(cluster, [text.removeprefix("cluster.") for text in overrides])
    if profile.backend.kind == "local":
        return runs or Path(profile.storage.path)
    if profile.backend.kind == "slurm":
        options = [word for text in overrides for word in ("--set", text)]
        options += [*(["--runs", str(runs)] if runs else []), *(["--quick"] if quick else [])]
        _refuse_outside(cluster, profile, [*options, *(["--json"] if as_json else [])])
    folder = user_path(runs or profile.storage.path).absolute()
    console.say(f"looking at {profile.nodes} nodes" + ("" if quick else "; a minute or two for all pairs"))
    with profile_lines(cluster, [f"cluster.{text.removeprefix('cluster.')}" for text in overrides]):
        diagnosis = diagnose_cluster(profile, load_backend(profile), folder, quick=quick)
    if as_json:
        console.emit_json(diagnosis.document())
    else:
        hints = [
            hint_text(each.node, reason) for each in diagnosis.nodes for reason in each.reasons if reason.hint
        ]
        hints += [f"{' - '.join(link.nodes)}: {link.why}" for link in diagnosis.links]
        _show(verdicts_table(diagnosis), hints, diagnosis.verdict)
    raise typer.Exit(diagnosis.exit_status)


def _refuse_outside(named: str, profile: ClusterProfile, options: Sequence[str]) -> None:
    """Raise UsageError outside of a SLURM job, with the command that looks at nodes inside of one."""
    import shlex

    from llmtrain.config.slurm import slurm_config
    from llmtrain.errors import UsageError
    from llmtrain.render.slurm import allocation_command

    if "SLURM_JOB_ID" in os.environ:
        return
    command = allocation_command(profile, ["llmtrain", "doctor", "--cluster", named, *options])
    login = slurm_config(profile.backend.slurm).login
    where = f"on {login}, where the profile must lie too: " if login else ""
    raise UsageError(
        "SLURM gives its nodes to jobs only: the doctor looks at those of the job that it runs in",
        where=named,
        hint=f"{where}`{shlex.join(command)}`",
    )


def hint_text(node: str, reason: Problem) -> str:
    """A reason and what to do; one that names its node already is not given another name."""
    where = reason.where or ("" if reason.message.startswith(f"{node}:") else node)
    return f"{where}: {reason.message}\n  hint: {reason.hint}".removeprefix(": ")


def _show(table: Any, hints: Sequence[str], verdict: str) -> None:
    from llmtrain.observe.terminal_views.screen import make_console, print_view

    print_view(make_console(), table)
    for hint in hints:
        console.say(hint)
    console.emit(verdict)
