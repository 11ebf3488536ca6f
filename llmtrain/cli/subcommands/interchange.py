"""`llmtrain checkpoint export` and `import`: to and from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli import console
from llmtrain.cli.options import RUNS, ClusterName, Json, Overrides, RecipeName, RunFolder, RunName, Runs
from llmtrain.cli.progress import ProgressLine
from llmtrain.errors import CheckpointError, LlmtrainError

if TYPE_CHECKING:
    from llmtrain.run.checkpoints import Checkpoint
    from llmtrain.run.layout import RunDir


class Format(StrEnum):
    """What a checkpoint can be exported to."""

    HF = "hf"


class Numbers(StrEnum):
    """Format of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


SAFETENSORS_NAMES = {Numbers.FLOAT32: "F32", Numbers.BFLOAT16: "BF16"}


def export(
    reference: RunName,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist.")],
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", min=0, help="Default: the newest whole checkpoint.")
    ] = None,
    to: Annotated[Format, typer.Option("--to", help="hf: a Hugging Face folder.")] = Format.HF,
    dtype: Annotated[Numbers, typer.Option("--dtype", help="Format of the weights.")] = Numbers.FLOAT32,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    `transformers` loads it: config.json, safetensors and the tokenizer's files; the checkpoint is verified
    first.
    """
    from llmtrain.run.find import find_run
    from llmtrain.run.interchange.export import export_huggingface
    from llmtrain.run.job_file import read_job_file

    del to  # there is one format so far
    run = find_run(reference, runs)
    job = read_job_file(run.job_json)
    checkpoint = _whole_checkpoint(run, job.run_id, step)
    tokenizer, separator, missing = _tokenizer(run)
    architecture = export_huggingface(
        checkpoint.path,
        out,
        job.spec.recipe.model,
        dtype=SAFETENSORS_NAMES[dtype],
        tokenizer=tokenizer,
        separator=separator,
        progress=_progress("writing"),
    )
    if as_json:
        told = {"path": str(out), "architecture": architecture, "step": checkpoint.step, "dtype": dtype.value}
        console.emit_json({"export": told})
        return
    console.emit(f"{out}: {architecture}, step {checkpoint.step}, {dtype.value}")
    if missing:
        console.say(f"no tokenizer files: {missing}")


def import_(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face folder with safetensors.")],
    recipe: RecipeName,
    cluster: ClusterName = "local",
    overrides: Overrides = None,
    run_dir: RunFolder = None,
    as_json: Json = False,
) -> None:
    """Make a run that starts from a Hugging Face folder.

    `llmtrain resume` starts it. The recipe's model must be the folder's: `model: {from: FOLDER}` says so.
    Pickle files are never loaded.
    """
    from llmtrain.config.job import resolve
    from llmtrain.plan.make import make_plan
    from llmtrain.run.interchange.importing import import_huggingface
    from llmtrain.run.interchange.start import start_info
    from llmtrain.supervise.create import create_run, discard_run, plan_as_files, run_dir_for

    spec = resolve(recipe, cluster, overrides or [])
    plan = make_plan(spec)
    run = run_dir_for(spec.recipe.name, spec.cluster.storage.path, run_dir)
    create_run(run, plan_as_files(run, spec, plan)[1])
    try:
        info = start_info(spec.recipe, run.run_id)
        import_huggingface(source, run.checkpoints, spec.recipe.model, info, progress=_progress("importing"))
    except BaseException:
        discard_run(run)
        raise
    if as_json:
        console.emit_json({"run": run.run_id, "path": str(run.path), "imported": str(source)})
        return
    console.emit(f"{run.path}: starts from {source}")
    console.say(f"start it with `llmtrain resume {run.argument}`")


def _whole_checkpoint(run: RunDir, run_id: str, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest whole one, verified; raises CheckpointError."""
    from llmtrain.run.checkpoints import newest_valid, resolve_step, verify

    found = resolve_step(run.checkpoints, step)
    if step is None:
        selection = newest_valid(run.checkpoints, run_id=run_id)
        console.say_problems(selection.skipped, word="warning")
        return selection.checkpoint or found
    problems = verify(found.path, run_id=run_id)
    if problems:
        error = CheckpointError(problems[0].message)
        error.problems = tuple(problems)
        raise error
    return found


def _tokenizer(run: RunDir) -> tuple[Path | None, int | None, str]:
    """tokenizer.json of the run's corpus, its end-of-text token, and why there is no such file."""
    from llmtrain.corpus.prepared import MANIFEST, read_manifest
    from llmtrain.run.data_file import read_data_file

    try:
        folder = Path(read_data_file(run.data_json).corpora[0].folder)
        tokenizer = read_manifest(folder / MANIFEST)[0].tokenizer
    except LlmtrainError as error:
        why = f"{error.problems[0].where}: {error.problems[0].message}"
        return None, None, f"the corpus that would tell of a tokenizer is not to be read ({why})"
    if tokenizer.name == "bytes":
        return (
            None,
            tokenizer.separator,
            "the built-in byte tokenizer has none (token ids are bytes of UTF-8)",
        )
    path = Path(tokenizer.name)
    if not path.is_file():
        return None, tokenizer.separator, f"the run's tokenizer is gone: {path}"
    return path, tokenizer.separator, ""


def _progress(word: str) -> Callable[[int, int], None]:
    line = ProgressLine()

    def report(done: int, total: int) -> None:
        line.tell(f"{word}: {done / total:.0%} of {total / 1e9:.1f} GB")
        if done >= total:
            line.clear()

    return report
