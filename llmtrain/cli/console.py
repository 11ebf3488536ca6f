"""What a person or a program sees: data on standard output, talk on standard error.

Colour follows NO_COLOR and is used on terminals only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from llmtrain.errors import Problem

SCHEMA = 1
"""Version of every `--json` object."""

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def emit(text: str) -> None:
    """Data, for standard output; a newline is added."""
    sys.stdout.write(f"{text}\n")


def emit_json(document: Mapping[str, Any]) -> None:
    """One JSON object, for standard output; `"schema": 1` comes first.

    Raises ValueError for infinities and NaN.
    """
    content = {"schema": SCHEMA, **document}
    emit(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


def say(text: str) -> None:
    """Talk, for standard error; a newline is added."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def say_problems(problems: Sequence[Problem], *, word: str = "error") -> None:
    """Problems as a person reads them: `error: place: what` and a hint each, and their number."""
    colour = "yellow" if word == "warning" else "red"
    for problem in problems:
        head, _, hint = problem.text().partition("\n")
        say(f"{paint(f'{word}:', colour, 'bold', stream=sys.stderr)} {head}")
        if hint:
            say(paint(hint, "dim", stream=sys.stderr))
    if len(problems) > 1 and word == "error":
        say(f"{len(problems)} problems")


def problem_documents(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Problems as the JSON contract has them."""
    return [{"where": entry.where, "message": entry.message, "hint": entry.hint} for entry in problems]


def paint(text: str, *styles: str, stream: TextIO | None = None) -> str:
    """Text in colour when the stream (default: standard output) shows colour."""
    if not text or not shows_colour(stream if stream is not None else sys.stdout):
        return text
    codes = ";".join(_STYLES[style] for style in styles)
    return f"\x1b[{codes}m{text}\x1b[0m"


def shows_colour(stream: TextIO) -> bool:
    """Whether colour is wanted: a terminal that can, and no NO_COLOR."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), bold: bool = True
) -> str:
    """A table of aligned columns with two spaces between them.

    Columns in `right` are aligned to the right; the header is bold where colours are shown.
    """
    flush_right = set(right)
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    lines = []
    for number, row in enumerate((header, *rows)):
        cells = [
            cell.rjust(widths[index]) if index in flush_right else cell.ljust(widths[index])
            for index, cell in enumerate(row)
        ]
        line = "  ".join(cells).rstrip()
        lines.append(paint(line, "bold") if number == 0 and bold else line)
    return "\n".join(lines)


def quiet_standard_output() -> None:
    """Send what is still buffered for a closed pipe to nowhere, so that leaving the process says nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        return
    finally:
        os.close(nowhere)
