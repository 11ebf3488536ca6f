"""A port for the rendezvous, held open until ranks start, and a knock at another node's.

The port that the store of a new attempt will listen on is picked by listening on it; so it is free, and the
other nodes can try before any rank starts whether they get through. A firewall between two nodes would
otherwise show as minutes of silence.
"""

from __future__ import annotations

import socket
import time

FIRST_PAUSE = 0.1
"""Seconds before a second try; each further pause is twice as long."""
LONGEST_KNOCK = 4.0
"""No try begins later: shorter than the silence after which an agent counts as lost."""


class Door:
    """A listening socket; nothing is ever accepted on it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def open(self) -> int:
        """Listen on a free port and return it. The kernel hands out ephemeral ports at random, so that nearly
        all attempts get different ones."""
        self.close()
        # Dual stack where there is IPv6, as the store listens.
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
        )
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """Free the port; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def knock(address: str, port: int, timeout: float, retries: int) -> str:
    """Why a port cannot be reached from here, after the last of `retries` + 1 tries of `timeout` seconds
    each; empty when it can."""
    started, pause, error = time.monotonic(), FIRST_PAUSE, ""
    for number in range(retries + 1):
        error = _try(address, port, timeout)
        if not error or number == retries or time.monotonic() - started + pause + timeout > LONGEST_KNOCK:
            break
        time.sleep(pause)
        pause *= 2
    return error and (f"{error} in {number + 1} tries" if number else error)


def _try(address: str, port: int, timeout: float) -> str:
    try:
        socket.create_connection((address, port), timeout=timeout).close()
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except (OSError, UnicodeError) as error:
        return (getattr(error, "strerror", None) or str(error)).lower()
    return ""
