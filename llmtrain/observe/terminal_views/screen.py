"""What the terminal can do: width, height, colour, characters."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rich.console import Console, RenderableType

from llmtrain.observe.terminal_views.status import Screen

PIPE_WIDTH = 160
"""Columns where there is no terminal: what a script reads should not be cut at 80."""


def make_console(*, stderr: bool = False) -> Console:
    """A console that keeps to NO_COLOR and to the terminal's size and guesses no numbers or paths to
    paint."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def print_view(console: Console, view: RenderableType) -> None:
    """Print a view; where there is no terminal, without the blanks that fill its lines."""
    if console.is_terminal:
        console.print(view)
        return
    with console.capture() as capture:
        console.print(view)
    lines = (line.rstrip() for line in capture.get().splitlines())
    console.file.write("".join(f"{line}\n" for line in lines))


def screen_of(console: Console, *, full: bool = False) -> Screen:
    """The space on a console; with `full` the view is cut to the terminal's height."""
    return Screen(
        width=max(40, console.width),
        height=max(8, console.height - 1) if full else None,
        unicode=takes_unicode(console),
    )


def takes_unicode(console: Console) -> bool:
    """Whether braille and block characters can be written: the encoding can carry them, and the person's
    locale is not C or POSIX.
    """
    if _plain_locale(os.environ):
        return False
    encoding = getattr(console.file, "encoding", None) or sys.getdefaultencoding()
    return encoding.lower().replace("-", "") in ("utf8", "utf16", "utf32")


def _plain_locale(environment: Mapping[str, str]) -> bool:
    """Whether C or POSIX was asked for by name. Python writes UTF-8 then all the same, and puts C.UTF-8 into
    LC_CTYPE by itself (PEP 538), which therefore does not outweigh LANG. No locale at all is not a wish.
    """
    every, kind, language = (environment.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    coerced = kind in ("C.UTF-8", "C.utf8", "UTF-8")
    return (every or ("" if coerced else kind) or language) in ("C", "POSIX")
