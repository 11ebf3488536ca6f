"""How commands reach a node, and how one stays in conversation with a process there.

A command is a list of arguments, never a shell string. Nothing here waits without a limit: `run` has a
time-out, and a channel delivers its lines from a thread of its own, so that a silent peer can block nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmtrain.errors import RunError

OnLine = Callable[[bytes | None], None]
"""Called from the channel's thread with each line (without its newline), and once with None at the end."""


class TransportError(RunError):
    """A node cannot be reached, or a command could not be started on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A command that ended."""

    argv: tuple[str, ...]
    exit_code: int
    """Exit code, or -n when signal n ended it."""
    stdout: bytes
    stderr: bytes


class Channel(Protocol):
    """A process on a node, spoken to over its standard input and output."""

    def send(self, line: bytes) -> bool:
        """Queue one line for the process; returns at once, False when the channel is closed or choked."""
        ...

    def finish(self) -> None:
        """Close the process's standard input once what is queued was written."""
        ...

    def exit_code(self) -> int | None:
        """Exit code of the process (-n: killed by signal n), or None while it runs or when nobody knows."""
        ...

    def kill(self) -> None:
        """End the process and the conversation without asking."""
        ...


class Transport(Protocol):
    """The way to one node; cheap to make, connects on first use."""

    def run(self, argv: Sequence[str], *, timeout: float, stdin: bytes = b"") -> Completed:
        """Run a command to its end. Raises TransportError when it cannot start or takes longer than
        `timeout` seconds (it is then killed)."""
        ...

    def open(
        self, argv: Sequence[str], *, on_line: OnLine, stderr: Path, environment: Mapping[str, str]
    ) -> Channel:
        """Start a process to talk to; its standard error is appended to the local file `stderr`.

        `environment` is added to the node's own. Raises TransportError.
        """
        ...

    def put(self, path: Path, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file on the node, atomically. Raises TransportError."""
        ...

    def get(self, path: Path, *, limit: int) -> bytes:
        """The last `limit` bytes of a file on the node. Raises TransportError."""
        ...

    def close(self) -> None:
        """Let the connection go; idempotent."""
        ...
