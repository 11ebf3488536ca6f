"""Saves beside the training: it waits for a copy into host memory at most, a thread does the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.engine.checkpoint.aside import Aside
from llmtrain.engine.checkpoint.pieces import Piece, Ranks
from llmtrain.engine.checkpoint.save import Previous, Saved, owned_pieces, save_checkpoint
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import CheckpointInfo

Outcome = Saved | CheckpointError
Told = Callable[[Outcome, float, float], None]
"""Called in the thread when a save has ended, with its seconds, and how many of them training waited."""


class BackgroundSaves:
    """Saves of one attempt, one after the other. All ranks must start the same ones in the same order."""

    def __init__(
        self,
        root: Path,
        pieces: Sequence[Piece],
        ranks: Ranks,
        *,
        writer: str,
        incremental: int,
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """`incremental` is how many incremental checkpoints may follow a full one; they need a second copy
        of the state in host memory, to compare with."""
        self._root, self._ranks, self._writer, self._most = root, ranks, writer, incremental
        self._before_commit = before_commit
        self._aside: Aside[Outcome] = Aside("save", owned_pieces(pieces), copies=2 if incremental else 1)
        self._previous: tuple[int, Saved] | None = None
        """Which copy holds the newest committed state, and where that lies on disk."""
        self._chain = 0
        """Incremental checkpoints since the full one."""
        self._count = 0

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._aside.is_busy

    def start(self, info: CheckpointInfo, told: Told, *, own: Mapping[str, Any], incremental: bool) -> float:
        """Let the thread save the state as it is now, with `own`, state of this rank alone, after the save
        before. With `incremental` only changed bytes are written, where there is something to compare with
        and the chain is not too long yet.

        `finish_copy` must be called before the state changes. Returns the seconds that training waited for
        the save before. What goes wrong fails this save, on all ranks, and nothing else.
        """
        called = time.perf_counter()
        self._aside.wait()
        waited = time.perf_counter() - called
        base = self._previous if incremental and self._chain < self._most else None
        slot = 1 - self._previous[0] if self._previous else 0
        self._count += 1
        number = self._count

        def save(pieces: Iterable[Piece]) -> Outcome:
            self._ranks.begin(number)
            previous = Previous(base[1].base, self._aside.copies[base[0]].pieces) if base else None
            outcome = self._try_to_save(info, pieces, own, previous)
            if isinstance(outcome, Saved):
                self._chain = 0 if outcome.is_full else self._chain + 1
                self._previous = (slot, outcome) if self._most else None
            told(outcome, time.perf_counter() - called, waited + self._aside.stall)
            return outcome

        self._aside.start(slot, save)
        return waited

    def finish_copy(self) -> None:
        """Wait until the state may change."""
        self._aside.finish_copy()

    def wait(self) -> Outcome | None:
        """Wait for the save under way; how the last one ended, None before the first."""
        return self._aside.wait()

    def _try_to_save(
        self,
        info: CheckpointInfo,
        pieces: Iterable[Piece],
        own: Mapping[str, Any],
        previous: Previous | None,
    ) -> Outcome:
        try:
            return save_checkpoint(
                self._root,
                info,
                pieces,
                self._ranks,
                writer=self._writer,
                own=own,
                previous=previous,
                before_commit=self._before_commit,
            )
        except CheckpointError as error:
            return error
