"""Saves beside the training: it waits for a copy into host memory, a thread does the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain.engine.checkpoint.pieces import Piece, Ranks
from llmtrain.engine.checkpoint.save import Previous, Saved, owned_pieces, save_checkpoint
from llmtrain.engine.checkpoint.staging import HostCopy
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import CheckpointInfo

Outcome = Saved | CheckpointError
Told = Callable[[Outcome, float, float], None]
"""Called in the thread when a save has ended, with its seconds, and how many of them the training waited."""


class BackgroundSaves:
    """Saves of one attempt, one after the other. All ranks must start the same ones in the same order."""

    def __init__(
        self, root: Path, pieces: Sequence[Piece], ranks: Ranks, *, writer: str, incremental: int
    ) -> None:
        """`incremental` is how many incremental checkpoints may follow a full one; they need a second copy
        of the state in host memory, to compare with."""
        self._root, self._ranks, self._writer, self._most = root, ranks, writer, incremental
        self._owned = owned_pieces(pieces)
        self._copies: list[HostCopy] = []
        self._previous: tuple[int, Saved] | None = None
        """Which copy holds the newest committed state, and where that lies on disk."""
        self._chain = 0
        """Incremental checkpoints since the full one."""
        self._pool = ThreadPoolExecutor(1, "save")
        self._running: Future[Outcome] | None = None
        self._count = 0
        self._prepared = self._pool.submit(self._take_memory)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._running is not None and not self._running.done()

    def start(self, info: CheckpointInfo, told: Told, *, own: Mapping[str, Any], incremental: bool) -> float:
        """Copy the state and let the thread save it, after the save before, with `own`, state of this rank
        alone. With `incremental` only changed bytes are written, where there is something to compare with
        and the chain is not too long yet.

        Returns the seconds that the training waited for the save before. What goes wrong fails this save, on
        all ranks, and nothing else.
        """
        called = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - called
        builds_upon = self._previous if incremental and self._chain < self._most else None
        slot = 1 - self._previous[0] if self._previous and self._most else 0
        pieces, previous = self._copied(slot), None
        if builds_upon is not None:
            previous = Previous(builds_upon[1].base, self._copies[builds_upon[0]].pieces)
        self._count += 1
        work = partial(
            save_checkpoint,
            self._root,
            info,
            pieces,
            self._ranks,
            writer=self._writer,
            own=own,
            previous=previous,
        )
        stall = time.perf_counter() - called
        tell = partial(self._tell, told, called, stall)
        self._running = self._pool.submit(self._save, self._count, slot, work, tell)
        return waited

    def wait(self) -> Outcome | None:
        """Wait for the save under way; how the last one ended, None before the first."""
        return None if self._running is None else self._running.result()

    def close(self) -> None:
        """Wait for the save under way and end the thread."""
        self._pool.shutdown()

    def _copied(self, slot: int) -> Iterable[Piece]:
        """The state as it is now; where there is no memory for it, pieces that fail once they are asked
        for."""
        try:
            if not self._copies:
                self._prepared.result()
            self._copies[slot].take()
        except (RuntimeError, MemoryError) as error:
            return _failing(error)
        return self._copies[slot].pieces

    # ---- in the thread
    def _take_memory(self) -> None:
        count = 2 if self._most else 1
        self._copies = [HostCopy(self._owned) for _ in range(count)]

    def _save(
        self, number: int, slot: int, work: Callable[[], Saved], tell: Callable[[Outcome], None]
    ) -> Outcome:
        self._ranks.begin(number)
        outcome: Outcome
        try:
            outcome = work()
            self._chain = 0 if outcome.is_full else self._chain + 1
            self._previous = (slot, outcome) if self._most else None
        except CheckpointError as error:
            outcome = error
        tell(outcome)
        return outcome

    @staticmethod
    def _tell(told: Told, called: float, stall: float, outcome: Outcome) -> None:
        told(outcome, time.perf_counter() - called, stall)


def _failing(error: Exception) -> Iterator[Piece]:
    raise RuntimeError(f"no host memory for a copy of the state: {error}") from error
    yield  # a generator: it fails when it is used
