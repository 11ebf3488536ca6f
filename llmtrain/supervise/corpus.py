"""The corpus of a run: prepared once, before the first attempt, and named in `data.json`."""

from __future__ import annotations

import time

from llmtrain.config.recipe import Recipe
from llmtrain.corpus.prepare import prepare
from llmtrain.corpus.prepared import open_prepared
from llmtrain.corpus.progress import Progress
from llmtrain.events.schema import Notice
from llmtrain.events.writer import EventWriter
from llmtrain.run.data_file import DataFile, read_data_file, write_data_file
from llmtrain.run.layout import RunDir
from llmtrain.supervise.control import Control

REPORT_SECONDS = 2.0


class StopWantedError(Exception):
    """Somebody asked for a stop while the corpus was prepared; what is done is kept for the next time."""


def ensure_corpus(run: RunDir, recipe: Recipe, control: Control, writer: EventWriter) -> None:
    """Prepare what the recipe names and write `data.json`; a run that has one only checks it.

    Corpora lie in `.corpora` beside the runs, which share them. Raises StopWantedError, CorpusError, and
    UsageError for a source that cannot be used.
    """
    if run.data_json.exists():
        known = read_data_file(run.data_json)
        open_prepared(run.path.parent / known.folder, digest=known.digest)
        return
    report = _Reporter(control, writer)
    corpus = prepare(recipe.data, run.path.parent / ".corpora", progress=report)
    corpus.check_fits(
        vocab=recipe.model.vocab,
        sequence=recipe.model.sequence,
        validation=recipe.data.validation_every > 0,
    )
    write_data_file(run.data_json, DataFile(folder=str(corpus.folder.resolve()), digest=corpus.digest))
    report.done(corpus.train.tokens)


class _Reporter:
    """Tells people how far a preparation is, and lets them stop it."""

    def __init__(self, control: Control, writer: EventWriter) -> None:
        self._control, self._writer = control, writer
        self._said = self._begun = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if self._control.wish() is not None:
            raise StopWantedError
        now = time.monotonic()
        if now - self._said < REPORT_SECONDS:
            return
        self._said = now
        share = f" {100 * progress.done / progress.total:.0f} %" if progress.total else ""
        self._writer.emit(Notice(message=f"preparing the corpus: {progress.phase}{share}"))

    def done(self, tokens: int) -> None:
        seconds = time.monotonic() - self._begun
        self._writer.emit(Notice(message=f"corpus ready: {tokens:,} training tokens ({seconds:.1f} s)"))
