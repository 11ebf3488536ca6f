"""A node over SSH: commands, files, and agents to talk to."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

import paramiko

from llmtrain.config.hosts import Host
from llmtrain.transport.base import Completed, OnLine, TransportError
from llmtrain.transport.ssh_channel import SshChannel, exchange
from llmtrain.transport.ssh_connect import Connection, connect
from llmtrain.transport.ssh_script import NOT_FOUND, bootstrap, exit_code, open_script, run_script
from llmtrain.transport.ssh_settings import OpenSshConfig, SshSettings

SESSIONS = 8
"""Sessions opened over one connection before another is made; sshd allows 10 unless it is told otherwise."""
GET_SECONDS = PUT_SECONDS = 60.0
CLOSE_SECONDS = 5.0
_CANNOT_RUN = re.compile(rb"timeout: failed to run command .*: (.*)")


class SshTransport:
    """The way to one node; connects on first use, and again after the connection was lost."""

    def __init__(self, host: Host, config: OpenSshConfig) -> None:
        self._host, self._config = host, config
        self._lock = threading.Lock()
        self._connections: list[_Shared] = []
        self._kills: list[threading.Thread] = []
        self._is_closed = False

    @property
    def settings(self) -> SshSettings:
        """How the node is reached. Raises TransportError."""
        return self._config.settings(self._host)

    def connect(self) -> None:
        """Connect now, so that what keeps us out comes to light. Raises TransportError."""
        with self._lock:
            self._roomy()

    def run(self, argv: Sequence[str], *, timeout: float, stdin: bytes = b"") -> Completed:
        """Run a command to its end; see `Transport.run`.

        A command that outlives the time is killed on the node, even when the connection is lost.
        """
        deadline = time.monotonic() + timeout
        session, release = self._start(run_script(argv, timeout + 1), timeout)
        try:
            stdout, stderr = exchange(session, stdin, deadline)
        except TimeoutError as error:
            message = f"{self._host.name}: `{argv[0]}` took longer than {timeout:g} s and was killed"
            raise TransportError(message) from error
        finally:
            session.close()
            release()
        if session.exit_status < 0:
            raise TransportError(f"{self._host.name}: the connection was lost while `{argv[0]}` ran")
        code = exit_code(session.exit_status)
        done = Completed(argv=tuple(argv), exit_code=code, stdout=stdout, stderr=stderr)
        if code in (126, 127):
            self._raise_if_not_started(done)
        return done

    def open(
        self, argv: Sequence[str], *, on_line: OnLine, stderr: Path, environment: Mapping[str, str]
    ) -> SshChannel:
        """Start a process to talk to; see `Transport.open`."""
        stderr.parent.mkdir(parents=True, exist_ok=True)
        script = open_script(argv, environment)
        session, release = self._start(script, self.settings.options.connect_timeout)

        def line_or_end(line: bytes | None) -> None:
            if line is None:
                release()
            on_line(line)

        def kill(pid: int) -> None:
            work = partial(self._kill, pid, session)
            thread = threading.Thread(target=work, name=f"kill-{self._host.name}", daemon=True)
            self._kills.append(thread)
            thread.start()

        return SshChannel(session, on_line=line_or_end, stderr=stderr, name=self._host.name, kill=kill)

    def put(self, path: Path, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file on the node, atomically and durably."""
        temporary = PurePosixPath(path).with_name(f".{path.name}.{time.monotonic_ns()}.tmp")
        # The size is checked, since a lost connection looks like the end of the data.
        script = (
            'umask 077; mkdir -p -- "$(dirname -- "$1")" && cat > "$2" && [ "$(wc -c < "$2")" -eq "$3" ] '
            '&& chmod "$4" "$2" && sync "$2" && mv -f -- "$2" "$1" || { rm -f -- "$2"; exit 1; }'
        )
        arguments = [str(path), str(temporary), str(len(data)), f"{mode:o}"]
        done = self.run(["sh", "-c", script, "put", *arguments], timeout=PUT_SECONDS, stdin=data)
        if done.exit_code:
            raise TransportError(f"{self._host.name}: {path} cannot be written: {_last_line(done.stderr)}")

    def get(self, path: Path, *, limit: int) -> bytes:
        """The last `limit` bytes of a file on the node."""
        done = self.run(["tail", "-c", str(limit), "--", str(path)], timeout=GET_SECONDS)
        if done.exit_code:
            raise TransportError(f"{self._host.name}: {path} cannot be read: {_last_line(done.stderr)}")
        return done.stdout

    def close(self) -> None:
        """Close all connections to the node, for good; kills under way get a moment to arrive."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._kills:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._is_closed = True
        with self._lock:
            connections, self._connections = self._connections, []
        for each in connections:
            each.connection.close()

    def _kill(self, pid: int, session: paramiko.Channel) -> None:
        with suppress(TransportError):
            self.run(["kill", "-KILL", str(pid)], timeout=CLOSE_SECONDS)
        with suppress(paramiko.SSHException, OSError, EOFError):
            session.close()

    # ---- sessions
    def _start(self, script: str, timeout: float) -> tuple[paramiko.Channel, Callable[[], None]]:
        data = script.encode("utf-8", "surrogateescape")
        session, release = self._session(timeout)
        try:
            session.exec_command(bootstrap(len(data)))
            session.settimeout(timeout)
            session.sendall(data)
            session.settimeout(None)
        except (paramiko.SSHException, OSError, EOFError) as error:
            session.close()
            release()
            raise TransportError(
                f"{self._host.name}: a command could not be started: {_words_of(error)}"
            ) from error
        return session, release

    def _session(self, timeout: float) -> tuple[paramiko.Channel, Callable[[], None]]:
        """A new session over a connection that has room for it, and what gives the room back."""
        while True:
            with self._lock:
                shared = self._roomy()
                shared.open += 1
            try:
                session = shared.connection.transport.open_session(timeout=timeout)
                return session, partial(self._release, shared)
            except paramiko.ChannelException as error:
                self._release(shared)
                shared.limit = shared.open
                if not shared.limit:
                    raise TransportError(
                        f"{self._host.name} accepts the login but opens no session: {error}",
                        hint="MaxSessions in its sshd_config must be at least 1",
                    ) from error
            except (paramiko.SSHException, OSError, EOFError) as error:
                self._release(shared)
                raise TransportError(
                    f"{self._host.name}: the connection was lost: {_words_of(error)}"
                ) from error

    def _roomy(self) -> _Shared:
        if self._is_closed:
            raise TransportError(f"{self._host.name}: the connection was closed")
        self._connections = [each for each in self._connections if each.connection.is_alive]
        for each in self._connections:
            if each.open < each.limit:
                return each
        self._connections.append(_Shared(connect(self.settings, self._config)))
        return self._connections[-1]

    def _release(self, shared: _Shared) -> None:
        with self._lock:
            shared.open -= 1

    def _raise_if_not_started(self, done: Completed) -> None:
        if NOT_FOUND.encode() in done.stderr:
            raise TransportError(f"{self._host.name}: `{done.argv[0]}` is not there")
        if found := _CANNOT_RUN.search(done.stderr):
            reason = found[1].decode("utf-8", "replace").lower()
            raise TransportError(f"{self._host.name}: `{done.argv[0]}` cannot be started: {reason}")


class _Shared:
    """A connection and the sessions open on it."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.open, self.limit = connection, 0, SESSIONS


def _last_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].rpartition(": ")[2].lower() if lines else "no reason given"


def _words_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
