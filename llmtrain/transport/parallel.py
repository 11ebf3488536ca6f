"""The same work on many nodes at once: a node that hangs is named and not waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from llmtrain.errors import LlmtrainError
from llmtrain.transport.base import TransportError

Key = TypeVar("Key")
Result = TypeVar("Result")
WIDTH = 64
"""Most nodes worked on at the same moment."""


def in_parallel(
    work: Mapping[Key, Callable[[], Result]], *, seconds: float | None, width: int = WIDTH
) -> tuple[dict[Key, Result], dict[Key, LlmtrainError]]:
    """Results and failures by key, both in the order of `work`, after at most `seconds`; None: when all is
    done, for work that has limits of its own.

    Work that is not done by then goes on in a thread that nobody waits for, and counts as failed. Errors that
    are no LlmtrainError are raised here.
    """
    waiting: queue.SimpleQueue[tuple[Key, Callable[[], Result]]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Key, Result | None, BaseException | None]] = queue.SimpleQueue()
    for item in work.items():
        waiting.put(item)

    def serve() -> None:
        while True:
            try:
                key, call = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((key, call(), None))
            except BaseException as error:
                done.put((key, None, error))

    for index in range(min(width, len(work))):
        threading.Thread(target=serve, name=f"parallel-{index}", daemon=True).start()
    results, failures = _gather(done, len(work), seconds)
    for key in work:
        if key not in results and key not in failures:
            failures[key] = TransportError(f"{key}: not done after {seconds:g} s")
    return (
        {key: results[key] for key in work if key in results},
        {key: failures[key] for key in work if key in failures},
    )


def _gather(
    done: queue.SimpleQueue[tuple[Key, Result | None, BaseException | None]],
    count: int,
    seconds: float | None,
) -> tuple[dict[Key, Result], dict[Key, LlmtrainError]]:
    """What comes of so many calls in time."""
    deadline = None if seconds is None else time.monotonic() + seconds
    results: dict[Key, Result] = {}
    failures: dict[Key, LlmtrainError] = {}
    while len(results) + len(failures) < count:
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            key, result, error = done.get(timeout=left)
        except queue.Empty:
            break
        if isinstance(error, LlmtrainError):
            failures[key] = error
        elif error is not None:
            raise error
        else:
            results[key] = result  # type: ignore[assignment]
    return results, failures
