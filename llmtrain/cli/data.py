"""`llmtrain data`: prepare a corpus and look at one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.options import Json
from llmtrain.cli.status import Runs
from llmtrain.errors import ExitStatus, Problem, UsageError

if TYPE_CHECKING:
    from llmtrain.corpus.audit import Audit
    from llmtrain.corpus.prepared import PreparedCorpus
    from llmtrain.corpus.progress import Progress

_HELP = "Prepare a corpus, look at prepared ones, and audit what a run consumed."
_Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="`python-stdlib`, text, jsonl or parquet files, folders, or a Megatron-LM prefix.",
    ),
]
_EVERY = 5.0
"""Seconds between two lines of progress when standard error is not a terminal."""


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, rich_markup_mode=None, no_args_is_help=True)
    group.command("prepare")(_prepare)
    group.command("show")(_show)
    group.command("audit")(_audit)
    tokenizers = typer.Typer(help="Train a tokenizer.", rich_markup_mode=None, no_args_is_help=True)
    tokenizers.command("train")(_train_tokenizer)
    group.add_typer(tokenizers, name="tokenizer")
    app.add_typer(group, name="data")


def _prepare(
    sources: _Sources,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="T", help="`bytes`, or a Hugging Face tokenizer.json.")
    ] = "bytes",
    validation: Annotated[
        float, typer.Option("--validation-fraction", metavar="F", help="Share held out, chosen by hash.")
    ] = 0.01,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Processes; default: one a core.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenise sources into a folder that `data.corpus` of a recipe can name.

    Killed or out of space, it goes on where it was when started again.
    """
    from llmtrain.corpus.prepare import prepare_folder

    begin = time.monotonic()
    corpus = prepare_folder(
        sources,
        out,
        tokenizer=tokenizer,
        validation_fraction=validation,
        workers=workers,
        progress=reporter(),
    )
    problems = _empty_splits(corpus, validation)
    _print(corpus, as_json, problems)
    console.say_problems(problems, word="warning")
    tokens = corpus.train.tokens + corpus.validation.tokens
    console.say(f"{tokens:,} tokens in {time.monotonic() - begin:.1f} s")


def _train_tokenizer(
    sources: _Sources,
    vocab: Annotated[int, typer.Option("--vocab", metavar="N", help="Tokens in the vocabulary.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tokenizer.json.")],
    validation: Annotated[
        float,
        typer.Option("--validation-fraction", metavar="F", help="Share of texts left out, as by prepare."),
    ] = 0.01,
    most: Annotated[
        str | None, typer.Option("--most", metavar="SIZE", help="Read at most so much text, e.g. `2 GB`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer on sources; `data.tokenizer` of a recipe can name the folder."""
    from llmtrain.corpus.progress import Progress
    from llmtrain.corpus.train_tokenizer import train_tokenizer
    from llmtrain.units import parse_bytes

    report = reporter()
    try:
        most_bytes = parse_bytes(most) if most is not None else None
    except ValueError as error:
        raise UsageError(str(error), where="--most") from error
    size = train_tokenizer(
        sources,
        out,
        vocab=vocab,
        validation_fraction=validation,
        most_bytes=most_bytes,
        progress=lambda done, total: report(Progress("learn", done, total)),
    )
    if as_json:
        console.emit_json({"tokenizer": {"path": str(out / "tokenizer.json"), "vocab": size}})
        return
    console.emit(f"{out / 'tokenizer.json'}: {size:,} tokens")


def _show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A prepared corpus.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare checksums.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a prepared corpus holds and where it comes from."""
    from llmtrain.corpus.prepared import open_prepared

    corpus = open_prepared(folder)
    if verify:
        corpus.verify()
    _print(corpus, as_json)
    if verify:
        console.say("all checksums match")


def _audit(
    reference: Annotated[
        str, typer.Argument(metavar="RUN", help="A run id, the beginning of one, or a path.")
    ],
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Prove from the events of all attempts that every sample was consumed exactly once, or say where not.

    Exit code 1 when it is not proven.
    """
    from dataclasses import asdict

    from llmtrain.corpus.audit import audit
    from llmtrain.corpus.ledger import read_cursors, read_ledgers
    from llmtrain.run.find import find_run

    run = find_run(reference, runs)
    cursors, unreadable = read_cursors(run)
    result = audit(read_ledgers(run), cursors, _global_batch(run.job_json))
    for name, reason in unreadable.items():
        result.problem(f"checkpoint {name} cannot be read: {reason}")
    proven = not result.problems and result.steps > 0
    if as_json:
        console.emit_json({"run": run.run_id, "proven": proven, **asdict(result)})
    else:
        _print_audit(result, proven)
    if not proven:
        raise typer.Exit(ExitStatus.FAILED)


def _print_audit(result: Audit, proven: bool) -> None:
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
    console.emit(console.columns(header, rows, right=(0, 3, 4)))
    if proven:
        console.emit(f"exactly once: steps 1..{result.steps}, samples 0..{result.samples - 1}")
        return
    console.emit("not proven" if result.steps else "not proven: no step was told")
    console.say_problems([Problem("", text) for text in result.problems], word="problem")


def _global_batch(job_json: Path) -> int | None:
    """Global batch of the run's recipe, None when job.json cannot be read."""
    try:
        return int(json.loads(job_json.read_bytes())["spec"]["recipe"]["batch"]["global"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def reporter() -> Callable[[Progress], None]:
    """A function that tells progress on standard error: one line that changes, or a line every few
    seconds."""
    live = sys.stderr.isatty()
    told = {"at": time.monotonic()}
    phases = {
        "wait": "another process prepares this corpus; waiting for it",
        "digest": "reading the sources",
        "tokenise": "tokenising",
        "merge": "writing the token files",
        "check": "checking",
        "learn": "reading text",
        "order": "shuffling documents",
    }

    def report(step: Progress) -> None:
        now = time.monotonic()
        text = phases[step.phase]
        if step.total:
            text += f": {step.done / step.total:4.0%} of {step.total / 1e6:,.1f} MB"
        if live:
            sys.stderr.write(f"\r\x1b[K{text}" if step.phase != "merge" else "\r\x1b[K")
            sys.stderr.flush()
        elif now - told["at"] >= _EVERY:
            told["at"] = now
            console.say(text)

    return report


def _empty_splits(corpus: PreparedCorpus, fraction: float) -> list[Problem]:
    """Splits without a token, which a run would notice only after its start."""
    manifest = corpus.manifest
    documents = manifest.train.documents + manifest.validation.documents
    found = []
    if not manifest.train.tokens:
        message = f"the split is empty: none of the {documents:,} documents is left to train on"
        found.append(Problem("train", message, "add text, or give a smaller --validation-fraction"))
    if not manifest.validation.tokens and fraction > 0:  # Of 0 it is what was asked for.
        message = f"the split is empty: {fraction:g} of {documents:,} documents held out none"
        hint = "give a larger --validation-fraction, or set data.validation_every to 0 in the recipe"
        found.append(Problem("validation", message, hint))
    return found


def _print(corpus: PreparedCorpus, as_json: bool, problems: Sequence[Problem] | None = None) -> None:
    if as_json:
        told = {} if problems is None else {"problems": console.problem_documents(problems)}
        console.emit_json({"corpus": _document(corpus), **told})
        return
    manifest = corpus.manifest
    console.emit(f"folder     {corpus.folder}")
    console.emit(f"digest     {corpus.digest[:16]}")
    kind = manifest.tokenizer
    console.emit(f"tokenizer  {kind.name}, {kind.vocab:,} tokens, separator {kind.separator}")
    for source in manifest.sources:
        console.emit(f"source     {source.source}: {source.files:,} files, {source.bytes:,} bytes")
    if manifest.empty_documents:
        console.emit(f"left out   {manifest.empty_documents:,} documents without text")
    if manifest.undecodable_files:
        console.emit(f"replaced   bytes that are not UTF-8, in {manifest.undecodable_files:,} files")
    rows = [
        [name, f"{split.tokens:,}", f"{split.documents:,}", split.dtype]
        for name, split in (("train", manifest.train), ("validation", manifest.validation))
    ]
    console.emit(console.columns(["SPLIT", "TOKENS", "DOCUMENTS", "DTYPE"], rows, right=(1, 2)))


def _document(corpus: PreparedCorpus) -> dict[str, Any]:
    from llmtrain.config.codec import to_json

    return {"folder": str(corpus.folder), "digest": corpus.digest, **to_json(corpus.manifest)}
