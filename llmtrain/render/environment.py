"""The one jinja2 environment: a misspelt name is an error, and every value comes out quoted for the shell.

Quoting is the default and not a filter that a template may forget: whatever `{{ }}` puts out is one shell
word. The two exceptions say so by name: `name(x)` (a variable's name, checked) and `comment(x)`.
"""

from __future__ import annotations

import shlex
from functools import cache
from typing import Any

import jinja2

from llmtrain import resources
from llmtrain.config.cluster import VARIABLE_NAME
from llmtrain.errors import ConfigError, Problem


class Plain(str):
    """Text that may stand in a script as it is."""

    __slots__ = ()


def quoted(value: Any) -> str:
    """One shell word for a text or an integer; raises TypeError for anything else."""
    if isinstance(value, Plain):
        return value
    if isinstance(value, jinja2.StrictUndefined):
        str(value)  # raises UndefinedError, which names what is missing
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"a template may put out texts and integers, not {value!r}")
    text = str(value)
    if "\0" in text:
        raise ConfigError([Problem("", f"{text!r} holds a NUL byte, which no shell can carry")])
    return shlex.quote(text)


def name(value: str) -> Plain:
    """A variable's name; raises ConfigError for anything that is none."""
    if not VARIABLE_NAME.fullmatch(value):
        raise ConfigError(
            [Problem("environment", f"{value!r} is no name of a variable", "use letters, digits and _")]
        )
    return Plain(value)


def comment(value: str) -> Plain:
    """Text for one comment line."""
    return Plain(" ".join(value.split()))


@cache
def environment() -> jinja2.Environment:
    """The environment of all templates."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.shipped_folder("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.globals.update(name=name, comment=comment)
    return made
