"""`llmtrain data`: prepare a corpus and look at one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.options import Json
from llmtrain.cli.progress import reporter
from llmtrain.cli.subcommands.audit import audit_run
from llmtrain.errors import InputError, Problem, UsageError

if TYPE_CHECKING:
    from llmtrain.corpus.prepared import PreparedCorpus

_HELP = "Prepare a corpus, look at one, audit what a run read."
_Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="`python-stdlib`, text, jsonl or parquet files, folders, or a Megatron-LM prefix.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, rich_markup_mode=None, no_args_is_help=True)
    group.command("prepare")(_prepare)
    group.command("show")(_show)
    group.command("audit")(audit_run)
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
    """Tokenise sources into a folder that a recipe can name.

    `data.corpus` of the recipe is that folder.

    Killed or out of space, it goes on where it was when started again.
    """
    from llmtrain.corpus.preparation.prepare import prepare_folder

    begin = time.monotonic()
    corpus = prepare_folder(
        sources,
        out,
        tokenizer=tokenizer,
        validation_fraction=validation,
        workers=workers,
        progress=reporter(),
    )
    problems = [*_plain_texts(sources), *_empty_splits(corpus, validation)]
    _print(corpus, problems, as_json=as_json)
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
    from llmtrain.corpus.preparation.train_tokenizer import train_tokenizer
    from llmtrain.corpus.progress import Progress
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
    from llmtrain.corpus.prepared import MANIFEST, is_prepared, open_prepared

    if not is_prepared(folder):
        hint = "run `llmtrain data prepare`"
        raise InputError("missing: this is not a prepared corpus", where=str(folder / MANIFEST), hint=hint)
    corpus = open_prepared(folder)
    if verify:
        corpus.verify()
    _print(corpus, as_json=as_json)
    if verify:
        console.say("all checksums match")


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


def _plain_texts(sources: Sequence[str]) -> list[Problem]:
    """Files with a suffix that says nothing to us, which may hold fields or bytes of some other format."""
    from llmtrain.corpus.preparation.adopt import is_indexed
    from llmtrain.corpus.preparation.sources import taken_for_text

    hint = "for documents in fields give jsonl (a field `text` in every line) or parquet (a column `text`)"
    return [
        Problem(source, f"read as plain text, for `{suffix}` is no suffix of a known format", hint)
        for source in sources
        if not is_indexed(source) and (suffix := taken_for_text(source))
    ]


def _print(corpus: PreparedCorpus, problems: Sequence[Problem] | None = None, *, as_json: bool) -> None:
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
