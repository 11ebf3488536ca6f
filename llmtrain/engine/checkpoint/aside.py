"""A thread that copies the training state into host memory and works on the copy, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from llmtrain.engine.checkpoint.pieces import Piece
from llmtrain.engine.checkpoint.staging import HostCopy

Result = TypeVar("Result")


class Aside(Generic[Result]):
    """One job at a time. A copy may run beside forward and backward passes, which do not change the state;
    `finish_copy` must be called before anything does."""

    def __init__(self, name: str, owned: Sequence[Piece], *, copies: int) -> None:
        """Memory for the copies is taken in the thread."""
        self._owned, self._count = owned, copies
        self.copies: list[HostCopy] = []
        self._pool = ThreadPoolExecutor(1, name, _use_device, (owned,))
        self._prepared = self._pool.submit(self._take_memory)
        self._running: Future[Result] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self.stall = 0.0
        """Seconds that training has waited for the newest job so far."""

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._running is not None and not self._running.done()

    def start(self, slot: int, work: Callable[[Iterable[Piece]], Result]) -> None:
        """Let the thread copy the state as it is now and work on the copy; after the job before. Where there
        is no memory, the pieces that `work` gets fail once it asks for them."""
        self.wait()
        self.stall = 0.0
        self._copied.clear()
        self._running = self._pool.submit(self._run, slot, work)

    def finish_copy(self) -> None:
        """Wait until the copy is whole: the state may change now."""
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self.stall += time.perf_counter() - began

    def wait(self) -> Result | None:
        """Wait for the job under way; what the last one returned, None before the first."""
        return None if self._running is None else self._running.result()

    # ---- in the thread
    def _take_memory(self) -> None:
        self.copies = [HostCopy(self._owned) for _ in range(self._count)]

    def _run(self, slot: int, work: Callable[[Iterable[Piece]], Result]) -> Result:
        pieces: Iterable[Piece]
        try:
            self._prepared.result()
            self.copies[slot].take()
            pieces = self.copies[slot].pieces
        except (RuntimeError, MemoryError) as error:
            pieces = _failing(error)
        finally:
            self._copied.set()
        return work(pieces)


def _use_device(owned: Sequence[Piece]) -> None:
    """Make the pieces' GPU the thread's: CUDA's choice is per thread, and the first GPU would hold a context
    for every rank of its node."""
    device = next((piece.data.device for piece in owned if piece.data.is_cuda), None)
    if device is not None:
        torch.cuda.set_device(device)


def _failing(error: Exception) -> Iterator[Piece]:
    raise RuntimeError(f"no host memory for a copy of the state: {error}") from error
    yield  # a generator: it fails when it is used
