"""How far something is, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from llmtrain.cli import progress
from llmtrain.corpus.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    report = progress.reporter()
    report(Progress("tokenise", 1_000_000, 4_000_000))
    report(Progress("merge", 4_000_000, 4_000_000))
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines == ["", "tokenising:  25% of 4.0 MB", "writing the token files: 100% of 4.0 MB", ""]


def test_elsewhere_what_is_quick_says_nothing(monkeypatch, capsys) -> None:
    report = progress.reporter()
    report(Progress("compare", 1, 2))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    report(Progress("compare", 2, 2))
    assert capsys.readouterr().err == "reading samples again: 100% of 2 steps\n"
