"""This machine, through subprocess."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from llmtrain.run.atomic import write_atomic
from llmtrain.transport.base import Completed, OnLine, TransportError
from llmtrain.transport.outbox import Outbox

SAID_CHARACTERS = 500
"""Most that is told of the last line of a command that was killed."""


class LocalChannel:
    """A child process in a session of its own, so that a terminal's signals do not reach it."""

    def __init__(self, process: subprocess.Popen[bytes], on_line: OnLine) -> None:
        assert process.stdin is not None
        self._process = process
        self._outbox = Outbox(self._write, process.stdin.close, str(process.pid))
        threading.Thread(target=self._read, args=(on_line,), name=f"lines-{process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def send(self, line: bytes) -> bool:
        """Queue one line; see `Channel.send`."""
        return self._outbox.send(line)

    def finish(self) -> None:
        """Close the child's standard input after what is queued."""
        self._outbox.finish()

    def exit_code(self) -> int | None:
        """Exit code of the child, None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL the child and reap it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._outbox.finish()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _read(self, on_line: OnLine) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                on_line(line.rstrip(b"\n"))
        on_line(None)


class LocalTransport:
    """Commands on this machine."""

    def run(self, argv: Sequence[str], *, timeout: float, stdin: bytes = b"") -> Completed:
        """Run a command to its end; see `Transport.run`."""
        try:
            done = subprocess.run(list(argv), input=stdin, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            last = (error.stderr or b"").decode("utf-8", "replace").strip().splitlines()[-1:]
            said = f"; it said: {last[0][:SAID_CHARACTERS]}" if last else ""
            message = f"`{argv[0]}` took longer than {timeout:g} s and was killed{said}"
            raise TransportError(message) from error
        except OSError as error:
            raise TransportError(f"`{argv[0]}` cannot be started: {error.strerror}") from error
        return Completed(argv=tuple(argv), exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def open(
        self, argv: Sequence[str], *, on_line: OnLine, stderr: Path, environment: Mapping[str, str]
    ) -> LocalChannel:
        """Start a process to talk to; see `Transport.open`."""
        stderr.parent.mkdir(parents=True, exist_ok=True)
        try:
            with stderr.open("ab") as log:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise TransportError(f"`{argv[0]}` cannot be started: {error.strerror}") from error
        return LocalChannel(process, on_line)

    def put(self, path: Path, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file atomically."""
        try:
            write_atomic(path, data, mode=mode)
        except OSError as error:
            raise TransportError(f"{path} cannot be written: {error.strerror}") from error

    def get(self, path: Path, *, limit: int) -> bytes:
        """The last `limit` bytes of a file."""
        try:
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
                return file.read(limit)
        except OSError as error:
            raise TransportError(f"{path} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Nothing to let go."""
