"""Runs of stand-in ranks on this machine, cleaned up after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from tests.support import stand_in_runs as runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared once for the tests of a file."""
    return runs.prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def make(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., RunDir]]:
    """Makes a run; its options are those of `stand_in_runs.make_run`."""
    made: list[RunDir] = []

    def make_one(**options: object) -> RunDir:
        run = runs.make_run(tmp_path / f"run-{len(made)}", **options)  # type: ignore[arg-type]
        runs.use_corpus(run, corpus)
        made.append(run)
        return run

    yield make_one
    for run in made:
        runs.clean_up(run)
