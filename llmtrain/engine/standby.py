"""A rank that was started before its attempt: it imports torch and waits to be let go.

It reads nothing, writes nothing but to its node's log, and touches no device until then.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

from llmtrain.engine.process import StopFlag, nothing_collected

LONGEST_WAIT = 24 * 3600.0
"""Seconds after which it leaves; a younger one may then take its place."""
LOOK_SECONDS = 1.0
LOWEST_PRIORITY = 19
ENDED = select.POLLHUP | select.POLLIN | select.POLLERR | select.POLLNVAL


def wait_in_standby(stop: StopFlag) -> bool:
    """Import what training needs, beside others that train, until standard input ends; whether to go on."""
    threading.Thread(target=_import_all, name="import", daemon=True).start()
    end = select.poll()
    end.register(0, ENDED)
    deadline = time.monotonic() + LONGEST_WAIT
    while not stop.is_set and time.monotonic() < deadline:
        if end.poll(LOOK_SECONDS * 1000):
            return True
    return False


def _import_all() -> None:
    """Only this thread gives way to those who train: priority, once lowered, would stay so for the rank."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    # The rank meets an error again, and tells it, when it needs the same.
    with suppress(Exception), nothing_collected():
        import llmtrain.engine.rank
        import llmtrain.run.job_file  # noqa: F401
