"""The agent's end of its channel: standard input and output, neither of which may ever block it."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

from llmtrain.agent.messages import Message, decode, encode

CHUNK = 1 << 16
UNSENT_LIMIT = 16 << 20
"""Bytes that may wait for a supervisor that does not read; more of them are dropped."""


class Link:
    """Messages over two file descriptors, which are made non-blocking."""

    def __init__(self, incoming: int = 0, outgoing: int = 1) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)
        self._received = b""
        self._unsent = bytearray()
        self._broken = False
        self.is_closed = False
        """Whether the supervisor's end was seen to close."""

    @property
    def wants_to_write(self) -> bool:
        """Whether lines wait for the supervisor to read."""
        return bool(self._unsent) and not self._broken

    def send(self, message: Message) -> None:
        """Queue a message and write what the pipe takes."""
        if len(self._unsent) < UNSENT_LIMIT:
            self._unsent += encode(message) + b"\n"
        self.write()

    def write(self) -> None:
        """Write what the pipe takes now."""
        try:
            while self._unsent and not self._broken:
                written = os.write(self.outgoing, self._unsent[:CHUNK])
                del self._unsent[:written]
        except BlockingIOError:
            pass
        except OSError:
            self._broken = True

    def read(self) -> list[Message]:
        """Whole messages that have arrived; sets `is_closed` at the end of the stream."""
        with suppress(BlockingIOError):
            while not self.is_closed:
                try:
                    data = os.read(self.incoming, CHUNK)
                except BlockingIOError:
                    raise
                except OSError:
                    data = b""
                self.is_closed = not data
                self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [message for line in lines if (message := decode(line)) is not None]

    def drain(self, seconds: float) -> None:
        """Write what is queued, waiting at most so long; for the last message."""
        deadline = time.monotonic() + seconds
        while self.wants_to_write and (left := deadline - time.monotonic()) > 0:
            select.select([], [self.outgoing], [], left)
            self.write()
