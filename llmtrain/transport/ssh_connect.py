"""One authenticated SSH connection to a node: direct, through jump hosts or a proxy command; watched.

A node that is silently gone (power, cable, a frozen kernel) sends nothing that a read could return on. So
every connection is asked every two seconds whether it lives, and closed when it does not answer; then all its
channels end.
"""

from __future__ import annotations

import logging
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import paramiko

from llmtrain.transport.base import TransportError
from llmtrain.transport.ssh_settings import OpenSshConfig, SshSettings
from llmtrain.transport.ssh_trust import (
    AuthenticationError,
    UntrustedHostError,
    authenticate,
    check_host_key,
    keys_of,
    prefer_known_types,
)

ASK_SECONDS = 2.0
"""Between two questions whether a connection lives."""
SILENCE_SECONDS = 6.0
"""A question that is not answered for so long ends the connection."""
FIRST_PAUSE = 0.5
"""Seconds before the first further try; each next pause is twice as long."""

logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Connection:
    """A live connection; `close` ends it and all its channels."""

    def __init__(
        self, transport: paramiko.Transport, settings: SshSettings, on_close: Callable[[], None]
    ) -> None:
        self.transport, self.settings, self._on_close = transport, settings, on_close
        self._asked: float | None = None
        for name, work in (("alive", self._ask), ("watch", self._watch)):
            threading.Thread(target=work, name=f"ssh-{name}-{settings.name}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the connection has neither been closed nor lost."""
        return self.transport.is_active()

    def close(self) -> None:
        """End the connection; idempotent."""
        with suppress(Exception):
            self.transport.close()
        self._on_close()

    def _ask(self) -> None:
        while self.transport.is_active():
            self._asked = time.monotonic()
            with suppress(paramiko.SSHException, OSError, EOFError):
                # Waits for the answer; OpenSSH answers this question with a refusal, which is an answer.
                self.transport.global_request("keepalive@openssh.com", wait=True)
            self._asked = None
            time.sleep(ASK_SECONDS)

    def _watch(self) -> None:
        while self.transport.is_active():
            asked = self._asked
            if asked is not None and time.monotonic() - asked > SILENCE_SECONDS:
                break
            time.sleep(ASK_SECONDS / 4)
        self.close()


def connect(settings: SshSettings, config: OpenSshConfig) -> Connection:
    """Connect and log in. Raises TransportError.

    Refusals are tried again (`options.retries` times, with growing pauses); silence, a wrong key and a name
    that does not resolve are not, since they do not pass by themselves.
    """
    tries = 1 + settings.options.retries
    pause = FIRST_PAUSE
    while True:
        tries -= 1
        try:
            return _connect_once(settings, config)
        except (UntrustedHostError, AuthenticationError):
            raise
        except _PassingError as error:
            if not tries:
                raise TransportError(str(error), hint=error.problems[0].hint) from error
        time.sleep(pause * random.uniform(0.75, 1.25))  # Nodes must not knock in step.
        pause *= 2


class _PassingError(TransportError):
    """Worth another try."""


def _connect_once(settings: SshSettings, config: OpenSshConfig) -> Connection:
    limit = settings.options.connect_timeout
    sock, on_close = _socket(settings, config)
    transport = None
    try:
        transport = paramiko.Transport(sock)
        transport.daemon = True
        transport.banner_timeout = transport.auth_timeout = transport.handshake_timeout = limit
        keys = keys_of(settings)
        prefer_known_types(transport, keys)
        _negotiate(transport, settings, limit)
        check_host_key(settings, keys, transport.get_remote_server_key())
        authenticate(transport, settings)
        return Connection(transport, settings, on_close)
    except BaseException as error:
        if transport is not None:
            with suppress(Exception):
                transport.close()
        on_close()
        if isinstance(error, paramiko.SSHException | OSError | EOFError):
            raise _dropped(settings, error) from error
        raise


def _negotiate(transport: paramiko.Transport, settings: SshSettings, limit: float) -> None:
    # With a time-out of its own, start_client returns as if it had succeeded when the time is over.
    done = threading.Event()
    transport.start_client(event=done)
    if not done.wait(limit):
        raise TransportError(
            f"{settings.describe()} accepts connections but does not speak SSH within {limit:g} s",
            hint="the node may be overloaded or hung; or backend.ssh.connect_timeout is too short",
        )
    if not transport.is_active():
        raise transport.get_exception() or paramiko.SSHException("negotiation failed")


def _dropped(settings: SshSettings, error: BaseException) -> TransportError:
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return TransportError(
            f"{settings.describe()} shares no algorithm with us: {error}",
            hint="its sshd is very old or very strict; see KexAlgorithms in its sshd_config",
        )
    words = str(error) or type(error).__name__
    return _PassingError(
        f"{settings.describe()} dropped the connection while it was set up: {words}",
        hint="too many logins at once (MaxStartups in its sshd_config), or see its log: `journalctl -u ssh`",
    )


# ---- the bytes underneath
def _socket(
    settings: SshSettings, config: OpenSshConfig
) -> tuple[socket.socket | paramiko.Channel, Callable[[], None]]:
    """A stream to the node's sshd, and what has to be closed with it."""
    if settings.proxy_command:
        return _through_command(settings)
    if settings.jumps:
        return _through_jumps(settings, config)
    sock = _direct(settings)
    return sock, sock.close


def _direct(settings: SshSettings) -> socket.socket:
    limit = settings.options.connect_timeout
    place = f"{settings.host} port {settings.port}"
    try:
        sock = socket.create_connection((settings.host, settings.port), timeout=limit)
    except (socket.gaierror, UnicodeError) as error:
        raise TransportError(
            f"{settings.name}: the name `{settings.host}` cannot be resolved here",
            hint=f"`HostName ADDRESS` below `Host {settings.name}` in ~/.ssh/config, or an address instead",
        ) from error
    except TimeoutError as error:
        raise TransportError(
            f"{settings.name}: no answer from {place} within {limit:g} s",
            hint=f"is the node up? `ping -c 1 {settings.host}`; slower networks: backend.ssh.connect_timeout",
        ) from error
    except ConnectionRefusedError as error:
        raise _PassingError(
            f"{settings.name}: {place} refuses connections",
            hint="is sshd running there? `systemctl status ssh`; another port: backend.ssh.port",
        ) from error
    except OSError as error:
        raise _PassingError(
            f"{settings.name}: no way to {place}: {error.strerror or error}",
            hint=f"`ip route get {settings.host}` shows the route from here",
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError, AttributeError):
        # Data that nobody acknowledges for so long ends the connection; our questions are such data.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_SECONDS * 1000))
    return sock


def _through_command(settings: SshSettings) -> tuple[socket.socket, Callable[[], None]]:
    """ProxyCommand: a program whose standard input and output lead to the node.

    It is the user's own shell line, run as OpenSSH runs it. (paramiko's ProxyCommand spins when that ends.)
    """
    near, far = socket.socketpair()
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"exec {settings.proxy_command}"],
        stdin=far.fileno(),
        stdout=far.fileno(),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    far.close()

    def close() -> None:
        near.close()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
            return
        process.kill()
        process.wait()

    return near, close


def _through_jumps(
    settings: SshSettings, config: OpenSshConfig
) -> tuple[paramiko.Channel, Callable[[], None]]:
    """ProxyJump: log in to the hosts on the way, each through the one before."""
    *before, last = settings.jumps
    hop = config.jump_settings(last)
    jump = connect(_with_jumps(hop, before), config)
    try:
        channel = jump.transport.open_channel(
            "direct-tcpip",
            (settings.host, settings.port),
            ("127.0.0.1", 0),
            timeout=settings.options.connect_timeout,
        )
    except (paramiko.SSHException, OSError, EOFError) as error:
        jump.close()
        raise _PassingError(
            f"{settings.name}: {hop.describe()} does not reach {settings.host} port {settings.port}: {error}",
            hint=f"try it there: `ssh {hop.name} nc -vz {settings.host} {settings.port}`",
        ) from error
    return channel, jump.close


def _with_jumps(hop: SshSettings, jumps: list[str]) -> SshSettings:
    from dataclasses import replace

    return replace(hop, jumps=tuple(jumps)) if jumps else hop
