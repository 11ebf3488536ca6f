"""Lines on their way to a peer that may have stopped reading: bounded, written by a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

CAPACITY = 1000


class Outbox:
    """Queues lines and writes them in order; never blocks its caller.

    `write` may block and may raise OSError, which ends the outbox; `close` is called once at the end.
    """

    def __init__(self, write: Callable[[bytes], object], close: Callable[[], object], name: str) -> None:
        self._write, self._close = write, close
        self._lines: deque[bytes | None] = deque()
        self._ready = threading.Condition()
        self._ended = False
        threading.Thread(target=self._drain, name=f"outbox-{name}", daemon=True).start()

    def send(self, line: bytes) -> bool:
        """Queue one line; False when the peer is gone or has left CAPACITY lines unread."""
        with self._ready:
            if self._ended or len(self._lines) >= CAPACITY:
                return False
            self._lines.append(line + b"\n")
            self._ready.notify()
            return True

    def finish(self) -> None:
        """Close the stream after the last queued line."""
        with self._ready:
            self._lines.append(None)
            self._ready.notify()

    def _drain(self) -> None:
        try:
            while (line := self._next()) is not None:
                self._write(line)
        except (OSError, ValueError):
            pass  # The peer is gone: its end of file tells the reader.
        finally:
            with self._ready:
                self._ended = True
            with suppress(OSError, ValueError):
                self._close()

    def _next(self) -> bytes | None:
        with self._ready:
            self._ready.wait_for(lambda: self._lines)
            return self._lines.popleft()
