"""Batches that are read before they are wanted: one thread reads ahead, in order, a bounded number of steps.

What is read is the same as without it: the thread asks for the same steps, one after the other. A step that
does not follow the last one (a rewind) makes it begin anew there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, Full, Queue

from llmtrain.engine.data import Batch, Batches
from llmtrain.engine.device import Device
from llmtrain.errors import CorpusError

AHEAD = 2
"""Steps that are ready at most; one more may be under way."""
STALL_SECONDS = 300.0
"""Without data for so long, a file counts as unreachable: reads from a dead file server never return."""
POLL = 0.05
"""Seconds between two looks of a waiting thread at its end."""


class PrefetchedBatches:
    """The batches of another source, read ahead."""

    def __init__(
        self, source: Batches, device: Device, last_step: int, *, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._source, self._device, self._last = source, device, last_step
        self._stall = stall_seconds
        self._reader: _Reader | None = None

    @property
    def reading(self) -> str:
        """File that is being read, or was last."""
        return self._source.reading

    @property
    def micro_batches(self) -> int:
        """See `Batches.micro_batches`."""
        return self._source.micro_batches

    @property
    def busiest(self) -> int:
        """See `Batches.busiest`."""
        return self._source.busiest

    def use_micro_batch(self, size: int) -> None:
        """See `Batches.use_micro_batch`; what was read ahead is dropped."""
        self.close()
        self._source.use_micro_batch(size)

    def fetch(self, step: int) -> Batch:
        """The batch of a step. Raises what reading it raised, and CorpusError naming the file when nothing
        comes for too long."""
        if self._reader is None or not self._reader.gives(step):
            self.close()
            self._reader = _Reader(self._read, step, max(step, self._last), self._device.use_in_thread)
        try:
            batch = self._reader.take(self._stall)
        except BaseException:  # The thread has ended; another try begins anew.
            self.close()
            raise
        if batch is None:
            raise CorpusError(
                f"gave no data for {self._stall:.0f} s",
                where=self.reading,
                hint="is its file system reachable from this node?",
            )
        return batch

    def close(self) -> None:
        """End the thread, unless a read never returns; what it had read is dropped."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, step: int) -> Batch:
        return self._source.fetch(step).map(self._device.pin)


class _Reader:
    """One thread that reads the steps from `first` to `last`."""

    def __init__(
        self, read: Callable[[int], Batch], first: int, last: int, enter: Callable[[], None]
    ) -> None:
        self._next = first
        self._read, self._first, self._last, self._enter = read, first, last, enter
        self._ready: Queue[Batch | BaseException] = Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._thread.start()

    def gives(self, step: int) -> bool:
        """Whether a step is what `take` gives next."""
        return self._next == step <= self._last

    def take(self, timeout: float) -> Batch | None:
        """The next batch; None when none comes in time. Raises what reading it raised."""
        try:
            found = self._ready.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        self._next += 1
        return found

    def close(self) -> None:
        """Tell the thread to end, and wait a moment for it."""
        self._stopped.set()
        self._thread.join(timeout=10 * POLL)

    def _run(self) -> None:
        try:
            self._enter()
            for step in range(self._first, self._last + 1):
                self._put(self._read(step))
                if self._stopped.is_set():
                    return
        except BaseException as error:  # The training thread raises it.
            self._put(error)

    def _put(self, item: Batch | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=POLL)
            except Full:
                continue
            return
