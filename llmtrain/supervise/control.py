"""What people ask of a supervisor: through signals, and through the run's STOP file."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from llmtrain.run.layout import RunDir

ECHO_SECONDS = 5.0
"""Signals of a scheduler within so long of each other are one."""
WORD_SECONDS = 3.0
"""Time for a scheduler's signal to arrive after the first sign of what it means."""
SPREAD_SECONDS = 1.0
"""Within which a scheduler's signal reaches all nodes."""


class Control:
    """The wish to stop, as seconds that ranks get to save and leave (0: now). It only grows stronger."""

    def __init__(self, run: RunDir, grace: float, *, is_for_good: bool = False) -> None:
        """`is_for_good`: a scheduler may start another supervisor by itself, so that a stop must outlive this
        one; then only a resume takes the STOP file away."""
        self._run, self._grace, self._is_for_good = run, grace, is_for_good
        self._signals, self._heard = 0, float("-inf")
        self._woken = threading.Event()

    def listen(self) -> None:
        """SIGTERM or SIGINT: save and leave; the second one: now. Call from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wish(self) -> float | None:
        """Seconds of grace when a stop is wanted, else None.

        The STOP file holds `now`, `save SECONDS`, or anything else for `save` with the default grace.
        """
        wishes = [] if not self._signals else [self._grace if self._signals == 1 else 0.0]
        with suppress(OSError):
            text = self._run.stop_file.read_text(encoding="utf-8", errors="replace")
            wishes.append(parse_stop(text, self._grace))
        return min(wishes, default=None)

    @property
    def is_requested(self) -> bool:
        """Whether a person asked, by the STOP file; signals come from schedulers, too."""
        return self._run.stop_file.exists()

    def is_leaving(self) -> bool:
        """Whether a stop is wanted. A scheduler that ends a job kills what runs on its nodes at the moment at
        which it tells us: its word is waited for."""
        self.sleep(WORD_SECONDS if self._is_for_good else 0.0)
        return self.wish() is not None

    def hear_of(self, all_told: Callable[[float], bool]) -> bool:
        """Take it for a scheduler's wish when all nodes, and only they, were told to leave: so begins the
        grace of a job that is preempted. `all_told` waits for that for so many seconds."""
        if not self._is_for_good or self._signals or not all_told(SPREAD_SECONDS):
            return False
        self._on_signal(signal.SIGTERM, None)
        return True

    def forget(self) -> None:
        """Take the STOP file away, once it was obeyed."""
        if self._is_for_good:
            return
        with suppress(FileNotFoundError):
            self._run.stop_file.unlink()

    def sleep(self, seconds: float) -> None:
        """Wait, but not longer than until the next signal or STOP file."""
        while seconds > 0 and self.wish() is None:
            self._woken.wait(min(seconds, 0.2))
            seconds -= 0.2

    def _on_signal(self, number: int, frame: object) -> None:
        now = time.monotonic()
        # A scheduler signals all processes of a job, and the batch script passes on what it got.
        if not self._is_for_good or now - self._heard > ECHO_SECONDS:
            self._signals += 1
        self._heard = now
        self._woken.set()


def parse_stop(text: str, grace: float) -> float:
    """Seconds of grace that a STOP file asks for."""
    words = text.split()
    if words[:1] == ["now"]:
        return 0.0
    if len(words) == 2 and words[0] == "save":
        with suppress(ValueError):
            return max(0.0, float(words[1]))
    return grace
