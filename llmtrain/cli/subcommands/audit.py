"""`llmtrain data audit`: prove what a run was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import RUNS, Json, RunName, Runs
from llmtrain.cli.progress import reporter
from llmtrain.errors import ExitStatus, LlmtrainError, Problem, UsageError

if TYPE_CHECKING:
    from llmtrain.config.recipe import Recipe
    from llmtrain.corpus.audit import Audit
    from llmtrain.corpus.ledger import StepRecord
    from llmtrain.run.layout import RunDir

COMPARED = 200
"""Steps whose samples are read again unless more are asked for."""


def audit_run(
    reference: RunName,
    runs: Runs = RUNS,
    compare: Annotated[
        str,
        typer.Option("--compare", metavar="N", help="Steps to read again, spread evenly, or `all`."),
    ] = str(COMPARED),
    as_json: Json = False,
) -> None:
    """Prove that every sample was consumed exactly once.

    Reads the events of all attempts, and says where it was not so. Steps tell a digest of what was read; some
    are read again from the corpora and compared. Exit code 1 when it is not proven, also where nothing could
    be compared; --compare 0 asks for the order alone.
    """
    from dataclasses import asdict

    from llmtrain.corpus.audit import audit
    from llmtrain.corpus.ledger import read_cursors, read_ledgers
    from llmtrain.run.find import find_run

    most = _most(compare)
    run = find_run(reference, runs)
    recipe = _recipe(run)
    cursors, unreadable = read_cursors(run)
    result, history = audit(read_ledgers(run), cursors, recipe.batch if recipe else None)
    for name, reason in unreadable.items():
        result.problem(f"checkpoint {name} cannot be read: {reason}")
    warning = "" if most == 0 else _compare(run, recipe, history, result, most)
    in_order = not result.problems and result.steps > 0
    proven = in_order and not warning
    if as_json:
        document = {"run": run.run_id, "proven": proven, "not_compared": warning, **asdict(result)}
        console.emit_json(document)
    else:
        _print(result, warning)
    if not proven:
        raise typer.Exit(ExitStatus.FAILED)


def _most(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"must be a number of steps or `all`, not {text!r}", where="--compare")
    return int(text)


def _recipe(run: RunDir) -> Recipe | None:
    """The run's recipe, None when job.json cannot be read."""
    from llmtrain.run.job_file import read_job_file

    try:
        return read_job_file(run.job_json, edited_too=True).spec.recipe
    except LlmtrainError:
        return None


def _compare(
    run: RunDir, recipe: Recipe | None, history: dict[int, StepRecord], result: Audit, most: int | None
) -> str:
    """Read samples again; returns why that could not be done."""
    from llmtrain.corpus.corpora import open_corpora, training_samples
    from llmtrain.corpus.evidence import compare_digests
    from llmtrain.corpus.progress import Progress
    from llmtrain.run.data_file import read_data_file

    if recipe is None:
        return "the recipe in job.json cannot be read"
    if not result.told_digests:
        return "no step told a digest of what it read" if result.steps else ""
    report = reporter()
    try:
        corpora = open_corpora(read_data_file(run.data_json), recipe, run.path.parent)
        compare_digests(
            history.values(),
            training_samples(corpora.train, recipe),
            result,
            most=most,
            progress=lambda done, total: report(Progress("compare", done, total)),
        )
    except LlmtrainError as error:
        return "; ".join(problem.text().partition("\n")[0] for problem in error.problems)
    return ""


def _print(result: Audit, not_compared: str) -> None:
    console.emit(_attempts_table(result))
    for skipped in result.skipped:
        console.emit(
            f"not trained on: samples {skipped.first_sample}..{skipped.end_sample - 1} "
            f"(step {skipped.step}, {skipped.reason})"
        )
    if result.compared_digests and not result.problems:
        console.emit(f"read again: {result.compared_digests} of {result.told_digests} steps, all as told")
    console.emit(_verdict(result, not_compared))
    console.say_problems([Problem("", text) for text in result.problems], word="problem")
    if not_compared and (result.problems or not result.steps):  # Else the verdict says it.
        console.say_problems([Problem("", f"contents not compared: {not_compared}")], word="warning")


def _attempts_table(result: Audit) -> str:
    rows = [
        [
            str(a.number),
            a.started_from,
            f"{a.first_step}..{a.last_step}" if a.last_step else "-",
            str(a.kept_steps),
            str(a.discarded_steps),
        ]
        for a in result.attempts
    ]
    header = ["ATTEMPT", "STARTED FROM", "STEPS", "KEPT", "DONE AGAIN"]
    return console.columns(header, rows, right=(0, 3, 4))


def _verdict(result: Audit, not_compared: str) -> str:
    """What is proven, in one line."""
    if not result.steps:
        return "not proven: no step was told"
    if result.problems:
        return "not proven"
    trained = f", {result.skipped_samples} of them not trained on" if result.skipped_samples else ""
    span = f"steps 1..{result.steps}, samples 0..{result.samples - 1}{trained}"
    if not_compared:
        return f"not proven: order proven from the ledger, {span}; contents not compared: {not_compared}"
    if result.compared_digests:
        return f"exactly once: {span}"
    return f"exactly once by the ledger: {span}; contents not compared, as asked"
