"""Every error a person may see, and the one table of exit codes."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit codes of every command, the same on every backend (README, "Exit codes")."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INFEASIBLE = 3
    RESUMABLE = 75
    DO_NOT_RESTART = 93


QUOTED_CHARACTERS = 200
"""Most that a message quotes of a value; what to type, in a hint, is never cut."""
_QUOTE = re.compile(r"`([^`]+)`")


def _shortened(quote: re.Match[str]) -> str:
    return quote[0] if len(quote[1]) <= QUOTED_CHARACTERS else f"`{quote[1][:QUOTED_CHARACTERS]}...`"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it is, what it is, and what to do about it.

    `where` is `file:line` for something a user wrote, else a dotted field (`batch.micro`) or a path.
    """

    where: str
    message: str
    hint: str = ""
    may_pass: bool = field(default=False, compare=False, repr=False)
    """Whether trying again may help: the file system refused, nothing is known to be bad."""

    def __post_init__(self) -> None:
        if len(self.message) > QUOTED_CHARACTERS:
            object.__setattr__(self, "message", _QUOTE.sub(_shortened, self.message))

    def text(self) -> str:
        """Return the problem as the lines a person reads."""
        where = self.where
        if len(where) > 2 * QUOTED_CHARACTERS:
            where = f"{where[:QUOTED_CHARACTERS]}...{where[-QUOTED_CHARACTERS // 2 :]}"
        head = f"{where}: {self.message}" if where else self.message
        return f"{head}\n  hint: {self.hint}" if self.hint else head


class LlmtrainError(Exception):
    """Base of all errors that are shown to a person without a traceback."""

    exit_status: ExitStatus = ExitStatus.FAILED

    def __init__(self, message: str, *, where: str = "", hint: str = "", may_pass: bool = False) -> None:
        super().__init__(message)
        self.problems: tuple[Problem, ...] = (Problem(where, message, hint, may_pass),)

    def text(self) -> str:
        """Return all problems as the text shown on standard error."""
        return "\n".join(problem.text() for problem in self.problems)


class ConfigError(LlmtrainError):
    """A recipe, profile, override or flag is wrong; carries all problems found, not the first."""

    exit_status = ExitStatus.USAGE

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems[0].message if problems else "invalid configuration")
        self.problems = tuple(problems)


class UsageError(LlmtrainError):
    """A command was called in a way that cannot work (unknown run, contradicting flags)."""

    exit_status = ExitStatus.USAGE


class InfeasibleError(LlmtrainError):
    """No layout satisfies the recipe on the cluster; carries the violated inequalities."""

    exit_status = ExitStatus.INFEASIBLE

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems[0].message if problems else "no feasible plan")
        self.problems = tuple(problems)


class RunError(LlmtrainError):
    """Something went wrong while a run was started, watched or read."""


class CheckpointError(LlmtrainError):
    """A checkpoint is missing, torn, corrupt or of another run."""


class CorpusError(LlmtrainError):
    """A prepared corpus is missing, torn, damaged or not the one that a run was started with."""


class InputError(CorpusError):
    """A file that was named is torn, unreadable or not of its kind: only another file changes that."""

    exit_status = ExitStatus.USAGE


_MISNAMED = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.EROFS,
    }
)


def is_misnamed(error: OSError) -> bool:
    """Whether the path that somebody named is to blame (exit code 2), not the disk that it lies on (1)."""
    return error.errno in _MISNAMED
