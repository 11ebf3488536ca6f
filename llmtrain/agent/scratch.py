"""A folder of the node's own for what torchrun notes about its workers; torchrun itself never removes it."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SCRATCH = "LLMTRAIN_SCRATCH"
"""Variable that names the folder to the node script."""


class Scratch:
    """The folder of one agent; of those of the run's earlier attempts, whose agents were killed, none stays.

    It does not lie in the run directory: storage that is full or away must not keep torchrun from starting.
    """

    def __init__(self, run: Path, attempt: int) -> None:
        digest = hashlib.sha256(str(run).encode("utf-8", "surrogateescape")).hexdigest()[:12]
        self._of_run, self._attempt = f"llmtrain-{digest}-", attempt
        self._path: Path | None = None

    def variables(self) -> dict[str, str]:
        """What tells the node script of it; {} where no folder can be made, then torchrun makes its own."""
        with suppress(OSError):
            self._path = Path(tempfile.mkdtemp(prefix=f"{self._of_run}{self._attempt}-"))
        return {} if self._path is None else {SCRATCH: str(self._path)}

    def sweep(self) -> None:
        """Remove those of earlier attempts; their processes are gone."""
        for folder in self._older():
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove it; nobody uses it any more."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)

    def _older(self) -> Iterator[Path]:
        for folder in Path(tempfile.gettempdir()).glob(f"{self._of_run}*"):
            attempt = folder.name.removeprefix(self._of_run).partition("-")[0]
            if attempt.isdecimal() and int(attempt) < self._attempt:
                yield folder
