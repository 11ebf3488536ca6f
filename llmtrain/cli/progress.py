"""How far something has come that takes long, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmtrain.cli import console

if TYPE_CHECKING:
    from llmtrain.corpus.progress import Progress

EVERY_SECONDS = 5.0
"""Between two lines where standard error is not a terminal."""
PHASES = {
    "wait": "another process prepares this corpus; waiting for it",
    "digest": "reading the sources",
    "tokenise": "tokenising",
    "merge": "writing the token files",
    "check": "checking",
    "learn": "reading text",
    "order": "shuffling documents",
    "compare": "reading samples again",
}
"""What goes on in each phase of `corpus/progress.py`."""


class ProgressLine:
    """One line that changes, on a terminal; elsewhere a line every few seconds, none for what is quick."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._told = time.monotonic()

    def tell(self, text: str) -> None:
        """Show how far it is."""
        if self._is_live:
            self._redraw(text)
        elif time.monotonic() - self._told >= EVERY_SECONDS:
            self._told = time.monotonic()
            console.say(text)

    def clear(self) -> None:
        """Make room for what is said next."""
        if self._is_live:
            self._redraw("")

    @staticmethod
    def _redraw(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def reporter() -> Callable[[Progress], None]:
    """A function that tells a person how far work on a corpus is."""
    line = ProgressLine()

    def report(step: Progress) -> None:
        text = PHASES[step.phase]
        if step.total:
            all_of_it = f"{step.total:,} steps" if step.phase == "compare" else f"{step.total / 1e6:,.1f} MB"
            text += f": {step.done / step.total:4.0%} of {all_of_it}"
        line.tell(text)
        if step.total and step.done >= step.total:
            line.clear()

    return report
