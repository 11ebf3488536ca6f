"""A run of real ranks on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from tests.support import stand_in_runs as runs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """The folder of a run that is not launched yet; what is left of it afterwards is ended."""
    run = RunDir(tmp_path / "run")
    yield run
    runs.clean_up(run)
