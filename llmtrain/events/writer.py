"""Append events to a JSONL file without ever slowing or stopping the writer's own work.

`emit` puts the event into a bounded queue; a thread encodes and writes it, so that lines of several processes
never mix. While the disk takes none (it is full, its server is away) the queue waits for it: events are the
ledger of what was trained on. What does not fit is counted and reported by an `events_dropped` event as soon
as one can be written again.
"""

from __future__ import annotations

import atexit
import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from llmtrain.events.event import LINE_LIMIT, Event, encode_line
from llmtrain.events.line_file import LineFile
from llmtrain.events.schema import EventsDropped, Payload
from llmtrain.events.words import Source

QUEUE_CAPACITY = 4096
CLOSE_SECONDS = 5.0
RETRY_SECONDS = 0.5
"""Between two tries to write an event that the disk did not take."""
HOPELESS = (errno.EINVAL,)
"""Errors of a write that no waiting mends."""


class EventWriter:
    """Writes the events of one source of one attempt; safe to use from several threads.

    Nothing here raises after the constructor: a disk that is full for too long, a vanished folder or a full
    queue costs events, never the training. The constructor makes the folder and raises OSError when it cannot
    open the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        attempt: int,
        source: Source,
        rank: int | None = None,
        capacity: int = QUEUE_CAPACITY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._run, self._attempt, self._source, self._rank = run, attempt, source, rank
        self._capacity, self._clock = capacity, clock
        self._queue: deque[Event] = deque()
        self._condition = threading.Condition()
        self._seq = 0
        self._unreported = 0
        self._reason = ""
        self._busy = False
        self._closed = False
        self._gives_up = float("inf")
        """When a closed writer does not wait for the disk any more; monotonic."""
        self.dropped = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path)
        self._thread = threading.Thread(target=self._drain, name="event-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, payload: Payload) -> None:
        """Queue one event, stamped now; returns at once, and drops and counts when the queue is full."""
        with self._condition:
            if self._closed or len(self._queue) >= self._capacity:
                self._count_dropped("the writer was closed" if self._closed else "the queue was full")
                self._seq += 1
                return
            self._queue.append(self._stamp(payload))
            self._condition.notify_all()

    def flush(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Wait until everything queued so far was handed to the system; False when that took longer."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Write what is queued, then stop; False when events were left behind after `timeout` seconds.
        Idempotent."""
        atexit.unregister(self.close)
        with self._condition:
            self._closed = True
            self._gives_up = time.monotonic() + 0.8 * timeout
            self._condition.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stamp(self, payload: Payload) -> Event:
        event = Event(
            time=self._clock(),
            run=self._run,
            attempt=self._attempt,
            source=self._source,
            rank=self._rank,
            seq=self._seq,
            payload=payload,
        )
        self._seq += 1
        return event

    def _count_dropped(self, reason: str, count: int = 1) -> None:
        self.dropped += count
        self._unreported += count
        self._reason = reason

    def _drain(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                batch = tuple(self._queue)
                self._queue.clear()
                self._busy = True
            for event in batch:
                self._report_dropped()
                self._write_patiently(event)
        self._report_dropped()
        self._file.close()

    def _report_dropped(self) -> None:
        """Say how many events are missing, once one can be written again."""
        with self._condition:
            count, reason = self._unreported, self._reason
            if not count:
                return
            self._unreported = 0
            event = self._stamp(EventsDropped(count=count, reason=reason))
        if self._write(event):
            with self._condition:
                self._unreported += count

    def _write_patiently(self, event: Event) -> None:
        """Write an event once the disk takes it; drop it when it never will, or when no time is left."""
        while error := self._write(event):
            may_pass = isinstance(error, OSError) and error.errno not in HOPELESS
            with self._condition:
                if not may_pass or time.monotonic() >= self._gives_up:
                    self._count_dropped(f"{self.path.name}: {error}")
                    return
                self._condition.wait_for(lambda: self._closed, RETRY_SECONDS)
                if self._closed:
                    self._condition.wait(RETRY_SECONDS / 10)

    def _write(self, event: Event) -> Exception | None:
        """Try to write an event; what was wrong when that failed."""
        try:
            line = encode_line(event)
            if len(line) > LINE_LIMIT:
                raise ValueError(f"an event of {len(line)} bytes is longer than {LINE_LIMIT}")
            self._file.append(line)
        except (OSError, ValueError, TypeError) as error:
            return error
        return None
