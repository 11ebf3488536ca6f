"""`llmtrain launch`: start a run and show it until it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import ClusterName, Json, Overrides, RecipeName, RunFolder
from llmtrain.cli.profile_lines import profile_lines
from llmtrain.errors import ExitStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.backends.base import Backend
    from llmtrain.config.cluster import ClusterProfile
    from llmtrain.config.job import JobSpec
    from llmtrain.render.scripts import RenderedJob
    from llmtrain.run.job_file import JobFile
    from llmtrain.run.layout import RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("launch")(_launch)


def _launch(
    recipe: RecipeName,
    cluster: ClusterName = "local",
    overrides: Overrides = None,
    run_dir: RunFolder = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files that a launch would write, and start nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave at once; the run goes on by itself.")
    ] = False,
    rehearsal: Annotated[
        str,
        typer.Option(
            "--rehearse",
            metavar="SCENARIO",
            help="Instead: make failures on purpose in tiny runs, and time detection and recovery: death, "
            "hang, slow, lost-node, returned-node, full-disk, corrupt-shard, preemption (a list, or all).",
        ),
    ] = "",
    as_json: Json = False,
) -> int:
    """Start a run and show it until it ends.

    Ctrl-C once saves and stops the run, twice stops it now. The exit code is the run's.
    """
    if rehearsal:
        from llmtrain.cli.rehearsal import rehearse_and_tell
        from llmtrain.errors import UsageError

        if dry_run or detach or run_dir is not None:
            raise UsageError("--rehearse goes with none of --dry-run, --detach and --run-dir")
        return rehearse_and_tell(recipe, cluster, overrides or [], rehearsal, as_json=as_json)
    return _launch_run(
        recipe, cluster, overrides or [], run_dir, dry_run=dry_run, detach=detach, as_json=as_json
    )


def _launch_run(
    recipe: str,
    cluster: str,
    overrides: list[str],
    run_dir: Path | None,
    *,
    dry_run: bool,
    detach: bool,
    as_json: bool,
) -> int:
    """Write a run's directory and start it, or show what would be written."""
    from llmtrain.config.job import resolve
    from llmtrain.plan.layouts.supported import check_supported
    from llmtrain.plan.make import make_plan
    from llmtrain.supervise.create import create_run, plan_as_files

    spec = resolve(recipe, cluster, overrides)
    with profile_lines(cluster, overrides):
        _check_here(spec.cluster)
    plan = make_plan(spec)
    check_supported(spec.recipe, plan.plans[0].layout)
    run, target = _folders(spec, run_dir)
    with profile_lines(cluster, overrides):
        job, rendered = plan_as_files(run, spec, plan, place=target)
    if dry_run:
        _show(target, rendered, as_json=as_json)
        return ExitStatus.DONE
    _refuse_inputs(spec, recipe, overrides)
    with profile_lines(cluster, overrides):
        backend = _fit_backend(job, target)
    console.say_problems(plan.problems, word="warning")
    create_run(run, rendered)
    is_here = target is run
    if not is_here:
        _note_where(run, spec.cluster)
    # What happens on another machine's disks cannot be shown as it goes.
    with profile_lines(cluster, overrides):
        return _start(run, job, backend, detach=detach or not is_here, as_json=as_json)


def _folders(spec: JobSpec, run_dir: Path | None) -> tuple[RunDir, RunDir]:
    """The new run's folder on this machine, and where the run lives: the same, but for a login node's."""
    from llmtrain.supervise.create import run_dir_for

    there = _login_folder(spec.cluster)
    run = run_dir_for(spec.recipe.name, "runs" if there else spec.cluster.storage.path, run_dir)
    return run, there(spec.cluster, run) if there else run


def _check_here(cluster: ClusterProfile) -> None:
    """Raise ConfigError for what this machine alone can tell is wrong, so that --dry-run finds it too."""
    if cluster.backend.kind == "ssh":
        from llmtrain.backends.ssh_hosts import named_hosts

        named_hosts(cluster)
    elif cluster.backend.slurm is not None and cluster.backend.slurm.setup:
        from llmtrain.backends.slurm.setup_lines import unreadable_setup
        from llmtrain.errors import ConfigError

        if problems := unreadable_setup(cluster.backend.slurm.setup):
            raise ConfigError(problems)


def _refuse_inputs(spec: JobSpec, recipe: str, overrides: list[str]) -> None:
    """Raise ConfigError when the corpus, where it is read on this machine, cannot be trained on."""
    from llmtrain.cli.inputs import HERE, missing_inputs, unfit_inputs
    from llmtrain.errors import ConfigError

    if spec.cluster.backend.kind not in HERE:
        return
    if problems := missing_inputs(recipe, overrides) or unfit_inputs(recipe, overrides):
        raise ConfigError(problems)


def _fit_backend(job: JobFile, target: RunDir) -> Backend:
    """The backend, which has looked whether the job can run there. Raises ConfigError."""
    from llmtrain.backends.registry import load_backend
    from llmtrain.errors import ConfigError
    from llmtrain.run.record import RunRecord
    from llmtrain.supervise.nodes.membership import fewest_nodes

    backend = load_backend(job.spec.cluster)
    fewest = fewest_nodes(job, RunRecord(run_id=job.run_id, created=0.0), None)
    if problems := backend.check(job.spec, target, fewest=fewest):
        raise ConfigError(problems)
    return backend


def _start(run: RunDir, job: JobFile, backend: Backend, *, detach: bool, as_json: bool) -> int:
    """Start a run that is written; one that is refused leaves nothing behind."""
    from llmtrain.cli.attach import start_and_attach
    from llmtrain.errors import ConfigError
    from llmtrain.supervise.create import discard_run

    try:
        return start_and_attach(run, job, backend, detach=detach, as_json=as_json)
    except ConfigError:
        # The profile is frozen in the folder: it can only be launched anew, into a new one.
        discard_run(run)
        raise


def _note_where(run: RunDir, cluster: ClusterProfile) -> None:
    """Write down where a run lives that does not live here. Raises RunError."""
    from llmtrain.backends.slurm.login import remote_of
    from llmtrain.errors import RunError
    from llmtrain.run.remote import write_remote

    try:
        write_remote(run, remote_of(cluster, run))
    except OSError as error:
        raise RunError(f"cannot be written: {error.strerror}", where=str(run.path)) from error


def _login_folder(cluster: ClusterProfile) -> Callable[[ClusterProfile, RunDir], RunDir] | None:
    """What tells the folder of a run on the login node, for a profile that has one somewhere else."""
    if cluster.backend.slurm is None or not cluster.backend.slurm.login:
        return None
    from llmtrain.backends.slurm.login import folder_there, is_elsewhere

    return folder_there if is_elsewhere(cluster) else None


def _show(run: RunDir, rendered: RenderedJob, *, as_json: bool) -> None:
    """The files as they would be written; nothing is added to their text."""
    if as_json:
        files = [{"path": name, "bytes": len(text.encode())} for name, text in rendered.files.items()]
        console.emit_json({"run": run.run_id, "path": str(run.path), "files": files})
        return
    for name, text in rendered.files.items():
        console.say(console.paint(f"==> {run.path / name} <==", "bold"))
        console.emit(text.removesuffix("\n"))
