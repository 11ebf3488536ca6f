"""Processes on a node seen from here: one to talk to, and one that runs to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import paramiko

from llmtrain.transport.base import OnLine
from llmtrain.transport.outbox import Outbox
from llmtrain.transport.ssh_script import exit_code

CHUNK = 1 << 16
LINE_LIMIT = 16 << 20
"""A longer line from an agent ends the conversation: it is not one of ours."""
OUTPUT_LIMIT = 64 << 20
"""Bytes of output of one command that are kept."""
STATUS_SECONDS = 2.0
"""Longest wait for an exit code after the end of the output."""


class SshChannel:
    """A process on a node, spoken to over a session."""

    def __init__(
        self,
        channel: paramiko.Channel,
        *,
        on_line: OnLine,
        stderr: Path,
        name: str,
        kill: Callable[[int], None],
    ) -> None:
        self._channel, self._kill = channel, kill  # `kill` returns at once.
        self._pid: int | None = None
        self._outbox = Outbox(self._write, channel.shutdown_write, name)
        threading.Thread(target=self._read, args=(on_line,), name=f"lines-{name}", daemon=True).start()
        threading.Thread(target=self._log, args=(stderr,), name=f"stderr-{name}", daemon=True).start()

    def send(self, line: bytes) -> bool:
        """Queue one line; see `Channel.send`."""
        return self._outbox.send(line)

    def finish(self) -> None:
        """Close the process's standard input after what is queued."""
        self._outbox.finish()

    def exit_code(self) -> int | None:
        """Exit code, or None while it runs and when the connection was lost before it was told."""
        known = self._channel.status_event.is_set() and self._channel.exit_status >= 0
        return exit_code(self._channel.exit_status) if known else None

    def kill(self) -> None:
        """Have the process killed, and close the session; waits for neither."""
        alive = self._pid is not None and not self._channel.closed and self.exit_code() is None
        self._outbox.finish()
        if alive and self._pid is not None:
            self._kill(self._pid)
        else:
            self._channel.close()

    def _write(self, line: bytes) -> None:
        self._channel.sendall(line)

    def _read(self, on_line: OnLine) -> None:
        rest = b""
        with suppress(OSError, EOFError):
            while len(rest) < LINE_LIMIT and (data := self._channel.recv(CHUNK)):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if self._pid is None and line.isdigit():
                        self._pid = int(line)  # The first line is ours.
                    else:
                        on_line(line)
        self._channel.status_event.wait(STATUS_SECONDS)
        with suppress(Exception):
            self._channel.close()
        on_line(None)

    def _log(self, path: Path) -> None:
        with suppress(OSError, EOFError), path.open("ab", buffering=0) as log:
            while data := self._channel.recv_stderr(CHUNK):
                log.write(data)


def exchange(session: paramiko.Channel, stdin: bytes, deadline: float) -> tuple[bytes, bytes]:
    """Send all input and collect all output at the same time; raises TimeoutError at the deadline."""
    errors: list[bytes] = []

    def send() -> None:
        with suppress(OSError, EOFError):
            session.sendall(stdin)
        with suppress(OSError, EOFError):
            session.shutdown_write()

    def read_errors() -> None:
        with suppress(OSError, EOFError):
            while data := session.recv_stderr(CHUNK):
                if sum(map(len, errors)) < OUTPUT_LIMIT:
                    errors.append(data)

    threads = [threading.Thread(target=work, daemon=True) for work in (send, read_errors)]
    for thread in threads:
        thread.start()
    output: list[bytes] = []
    size = 0
    while True:
        session.settimeout(_left(deadline))
        try:
            data = session.recv(CHUNK)
        except EOFError:
            break
        if not data:
            break
        size += len(data)
        if size <= OUTPUT_LIMIT:
            output.append(data)
    if not session.status_event.wait(_left(deadline)):
        raise TimeoutError
    threads[1].join(_left(deadline))
    return b"".join(output), b"".join(errors)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
