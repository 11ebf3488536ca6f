"""All corpora of a training: prepared, opened, and seen as the recipe's `data` wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmtrain.config.data import DataConfig
from llmtrain.config.recipe import Recipe
from llmtrain.corpus.document_index import DocumentTokens
from llmtrain.corpus.document_order import ShuffledDocuments, make_order, order_path
from llmtrain.corpus.preparation.prepare import prepare
from llmtrain.corpus.prepared import PreparedCorpus, is_prepared, open_prepared
from llmtrain.corpus.progress import Progress, Report
from llmtrain.corpus.samples import DocumentWindows, Samples, Windows, seed_of
from llmtrain.errors import LlmtrainError, Problem, UsageError
from llmtrain.resources import user_path
from llmtrain.run.data_file import CorpusPlace, DataFile


@dataclass(frozen=True, slots=True)
class Corpora:
    """The open corpora of a run, in the order of the blend."""

    train: tuple[Windows, ...]
    validation: tuple[Windows, ...]


def prepare_corpora(recipe: Recipe, storage: Path, *, progress: Report) -> tuple[DataFile, int]:
    """Prepare all that a recipe's `data` names below `storage`; return where it is and its training tokens.

    Raises as `prepare` does, and UsageError when the model cannot be trained on one of them.
    """
    data, places, tokens = recipe.data, [], 0
    for at, part in enumerate(data.parts):
        corpus = prepare(replace(data, corpus=part.corpus, blend=()), storage, progress=progress)
        check_fits(corpus, recipe)
        order = ""
        if data.shuffle == "documents":
            progress(Progress("order"))
            path = order_path(storage.resolve(), corpus.digest, seed_of(recipe.train.seed, at))
            make_order(corpus.train, path, seed_of(recipe.train.seed, at))
            order = str(path)
        folder = str(corpus.folder.resolve())
        places.append(CorpusPlace(folder=folder, digest=corpus.digest, order=order))
        tokens += corpus.train.tokens
        corpus.close()
    return DataFile(corpora=tuple(places)), tokens


def check_fits(corpus: PreparedCorpus, recipe: Recipe) -> None:
    """Raise UsageError when the recipe's model cannot be trained on a corpus."""
    corpus.check_fits(
        vocab=recipe.model.vocab,
        sequence=recipe.model.sequence,
        validation=recipe.data.validation_every > 0,
    )


def unfit_corpora(recipe: Recipe) -> Iterator[Problem]:
    """Prepared folders that `data` names and a training would refuse; places are dotted fields."""
    for field, name in recipe.data.corpora():
        folder = user_path(name)
        if not is_prepared(folder):
            continue
        try:
            corpus = open_prepared(folder)
            try:
                check_fits(corpus, recipe)
            finally:
                corpus.close()
        except LlmtrainError as error:
            for problem in error.problems:
                yield Problem(field, f"{problem.where}: {problem.message}", problem.hint)


def open_corpora(file: DataFile, recipe: Recipe, base: Path) -> Corpora:
    """Open a run's corpora, relative ones from `base`; raises CorpusError, and UsageError for what does not
    fit the recipe."""
    data = recipe.data
    if len(file.corpora) != len(data.parts):
        wanted = f"{len(file.corpora)} were prepared for the run, the recipe names {len(data.parts)}"
        raise UsageError(f"data.blend has another number of corpora: {wanted}")
    opened = [open_prepared(base / place.folder, digest=place.digest) for place in file.corpora]
    for corpus in opened:
        check_fits(corpus, recipe)
    train = tuple(
        _training(corpus, place, data, seed_of(recipe.train.seed, at))
        for at, (corpus, place) in enumerate(zip(opened, file.corpora, strict=True))
    )
    return Corpora(
        train=train,
        validation=tuple(_windows(corpus, data) for corpus in opened),
    )


def training_samples(sources: Sequence[Windows], recipe: Recipe) -> Samples:
    """The samples of a training over open corpora; raises ValueError for one without a window."""
    return Samples(
        sources,
        [part.weight for part in recipe.data.parts],
        sequence=recipe.model.sequence,
        seed=recipe.train.seed,
        documents=documents_of(sources, recipe.data),
    )


def documents_of(sources: Sequence[Windows], data: DataConfig) -> list[DocumentWindows] | None:
    """The sources where documents count, else None; raises ValueError for one that does not know its
    documents."""
    return list(_knowing(sources)) if data.packing == "documents" else None


def _knowing(sources: Sequence[Windows]) -> Iterator[DocumentWindows]:
    for source in sources:
        if not isinstance(source, DocumentWindows):
            raise ValueError(f"{type(source).__name__} does not know where documents begin")
        yield source


def _training(corpus: PreparedCorpus, place: CorpusPlace, data: DataConfig, seed: int) -> Windows:
    if data.shuffle == "documents":
        return ShuffledDocuments(corpus.train, Path(place.order), seed)
    return DocumentTokens(corpus.train) if data.packing == "documents" else corpus.train


def _windows(corpus: PreparedCorpus, data: DataConfig) -> Windows:
    return DocumentTokens(corpus.validation) if data.packing == "documents" else corpus.validation
