"""The corpus of a run: prepared once, before the first attempt, and named in `data.json`."""

from __future__ import annotations

import time
from pathlib import Path

from llmtrain.config.recipe import Recipe
from llmtrain.corpus.corpora import prepare_corpora
from llmtrain.corpus.prepared import open_prepared
from llmtrain.corpus.progress import Progress
from llmtrain.errors import CorpusError
from llmtrain.events.schema import Notice
from llmtrain.events.writer import EventWriter
from llmtrain.run.data_file import DataFile, read_data_file, write_data_file
from llmtrain.run.layout import RunDir
from llmtrain.supervise.control import Control

REPORT_SECONDS = 2.0


class StopWantedError(Exception):
    """Somebody asked for a stop while the corpus was prepared; what is done is kept for the next time."""


def ensure_corpus(run: RunDir, recipe: Recipe, control: Control, writer: EventWriter) -> None:
    """Prepare what the recipe names and write `data.json`; a run that has one only checks that all is there.

    Corpora lie in `.corpora` beside the runs, which share them. Raises StopWantedError, CorpusError, and
    UsageError for a source that cannot be used.
    """
    known: DataFile | None = None
    if run.data_json.exists():
        known = read_data_file(run.data_json)
        if not any(place.order and not Path(place.order).exists() for place in known.corpora):
            for place in known.corpora:
                open_prepared(run.path.parent / place.folder, digest=place.digest).close()
            return
    report = _Reporter(control, writer)
    found, tokens = prepare_corpora(recipe, run.path.parent / ".corpora", progress=report)
    if known is not None and known.digest != found.digest:
        raise CorpusError(
            f"has digest {found.digest[:16]}, but the run was started with {known.digest[:16]}",
            where="data",
            hint="give the run its corpus back, or launch a new one",
        )
    write_data_file(run.data_json, found)
    report.done(tokens)


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
