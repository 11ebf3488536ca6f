"""`llmtrain resume`: go on with a run that was stopped, gave up, or lost its supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.forward import forwarded
from llmtrain.cli.options import RUNS, Json, RunName, Runs
from llmtrain.errors import CheckpointError, ConfigError, ExitStatus

if TYPE_CHECKING:
    from llmtrain.backends.base import Backend
    from llmtrain.run.job_file import JobFile
    from llmtrain.run.ladder_file import Allowance
    from llmtrain.run.layout import RunDir
    from llmtrain.run.record import RunRecord


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("resume")(_resume)


def _resume(
    run: RunName,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave at once; the run goes on by itself.")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            metavar="N",
            help="Let it go on with as few as N nodes, also below the node-loss budget.",
        ),
    ] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> int:
    """Go on with a run from its newest valid checkpoint.

    Never silently from the beginning. Nodes that are fit again are taken up; with fewer than were
    planned, the ladder's layout for those that are left runs.

    A finished run is left as it is (exit code 0); a run that is being supervised is refused.
    """
    from llmtrain.backends.base import dead_holder
    from llmtrain.backends.registry import load_backend
    from llmtrain.cli.attach import start_and_attach
    from llmtrain.run.find import find_run
    from llmtrain.run.job_file import read_job_file
    from llmtrain.run.layout import RunDir
    from llmtrain.run.lease import refuse_if_supervised
    from llmtrain.run.record import read_record

    found = RunDir(find_run(run, runs).path.absolute())
    if (code := forwarded(found, run)) is not None:
        return code
    record, job = read_record(found), read_job_file(found.job_json)
    backend = load_backend(job.spec.cluster)
    refuse_if_supervised(found, dead=dead_holder(found, backend))
    if record.stage == "ended" and record.exit_status == ExitStatus.DONE:
        return _say_done(found, record, as_json=as_json)
    _make_ready(found, record, job, backend, nodes)
    return start_and_attach(found, job, backend, detach=detach, as_json=as_json)


def _make_ready(run: RunDir, record: RunRecord, job: JobFile, backend: Backend, nodes: int | None) -> None:
    """Look whether the run can go on, then bring its folder up to date. Raises LlmtrainError."""
    import sys

    from llmtrain.render.scripts import render_scripts
    from llmtrain.supervise.create import rewrite_scripts
    from llmtrain.supervise.nodes.membership import fewest_nodes

    if job.spec.cluster.storage.shared == "everywhere":
        _refuse_fresh(run, record)  # Elsewhere the checkpoints cannot be seen from here; the ranks look.
    fewest = fewest_nodes(job, record, _allowance(run, job, nodes))
    if problems := backend.check(job.spec, run, fewest=fewest):
        raise ConfigError(problems)
    run.stop_file.unlink(missing_ok=True)
    rewrite_scripts(run, render_scripts(job, run, python=sys.executable))


def _say_done(run: RunDir, record: RunRecord, *, as_json: bool) -> int:
    """Leave a finished run as it is."""
    console.say(
        f"run {run.run_id} is done: step {record.reached_step} was the last one; no checkpoint is looked "
        f"at (`llmtrain checkpoint verify {run.argument}` reads them)"
    )
    if as_json:
        console.emit_json({"run": run.run_id, "path": str(run.path), "exit_status": 0})
    return ExitStatus.DONE


def _allowance(run: RunDir, job: JobFile, nodes: int | None) -> Allowance | None:
    """How few nodes a person allows: now, or at an earlier time."""
    if nodes is None:
        from llmtrain.run.ladder_file import read_allowance

        return read_allowance(run)
    from llmtrain.supervise.decision.allowance import allow_fewer

    return allow_fewer(run, job, nodes)


def _refuse_fresh(run: RunDir, record: RunRecord) -> None:
    """Raise CheckpointError when the run has saved before and nothing of it can be loaded."""
    from llmtrain.run.checkpoints.verify import newest_valid

    selection = newest_valid(run.checkpoints, checksums=False)
    if selection.checkpoint is None and record.committed_step:
        raise CheckpointError(
            f"the run saved step {record.committed_step}, but its checkpoints are gone",
            where=str(run.checkpoints),
            hint="put them back, or start a new run with `llmtrain launch`",
        )
    if selection.skipped:
        console.say_problems(selection.skipped, word="warning")
