"""What a node is asked to do: a script for its /bin/sh in which every argument is one quoted word.

No command line is ever built from values. The script arrives on the standard input of `/bin/sh`, started by a
constant command that every login shell reads the same way. So values pass through no parser but sh's, and the
variables among them show up in no process list.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from llmtrain.config.cluster import VARIABLE_NAME
from llmtrain.transport.base import TransportError

NOT_FOUND = "llmtrain-command-not-found"
"""Said on standard error when a command is not there."""


def bootstrap(length: int) -> str:
    """The command that runs a script of `length` bytes from standard input.

    dd reads byte for byte, so that what follows the script is left for the script's own command.
    """
    return f"exec /bin/sh -c 'eval \"$(dd bs=1 count={length} 2>/dev/null)\"'"


def run_script(argv: Sequence[str], seconds: float) -> str:
    """Run a command; after `seconds` it and its children are killed, whoever still listens by then."""
    command = words(argv[:1])
    return (
        f"command -v {command} >/dev/null 2>&1 || {{ echo {NOT_FOUND} >&2; exit 127; }}\n"
        f"timeout -s KILL {seconds:g} {words(argv)}\nexit $?\n"
    )


def open_script(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command that first says its pid in a line of its own; sh waits and tells how it ended."""
    return (
        f"{_exports(environment)}exec 3<&0\n"
        f'/bin/sh -c \'echo "$$"; exec "$@"\' sh {words(argv)} <&3 3<&- &\n'
        'exec 3<&-\nwait "$!"\nexit $?\n'
    )


def exit_code(status: int) -> int:
    """Exit code of a command from sh's, which says 128 + n when signal n ended it."""
    return 128 - status if 128 < status <= 128 + 64 else status


def words(argv: Sequence[str]) -> str:
    """Arguments as quoted words; raises TransportError for a NUL character."""
    for word in argv:
        if "\0" in word:
            raise TransportError(f"the argument {word!r} holds a NUL character, which no command can carry")
    return " ".join(shlex.quote(word) for word in argv)


def _exports(environment: Mapping[str, str]) -> str:
    lines = []
    for name, value in environment.items():
        if not VARIABLE_NAME.fullmatch(name):
            raise TransportError(f"{name!r} is not the name of a variable")
        lines.append(f"export {name}={words([value])}\n")
    return "".join(lines)
