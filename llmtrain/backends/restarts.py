"""Whether a scheduler goes on with a run that stopped early."""

from __future__ import annotations

import time

from llmtrain.backends.base import AllocationBackend, Backend, JobHandle, JobState

POLL_SECONDS = 0.5
SETTLE_SECONDS = 90.0
"""How long a job that stopped early may take to leave, or to be queued again."""


def is_started_again(backend: Backend, handle: JobHandle, incarnation: str) -> bool:
    """Whether a scheduler goes on with a run that stopped early: with the same job, or the next of a chain.

    `incarnation` is of the job's start that has just ended.
    """
    if not isinstance(backend, AllocationBackend):
        return False
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        status = backend.poll(handle)
        if status.incarnation != incarnation:
            return True
        if status.state != JobState.RUNNING or time.monotonic() > deadline:
            return status.state == JobState.PENDING
        time.sleep(POLL_SECONDS)
