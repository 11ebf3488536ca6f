"""Run a function in a forked child and kill it at the n-th step it takes on the disk."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"})


def _count_down(left: int) -> None:
    """Kill this process just before its `left`-th disk operation (audited calls, write, fsync)."""
    state = {"left": left}

    def step(*_: object) -> None:
        state["left"] -= 1
        if state["left"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, _: object) -> None:
        if event in EVENTS:
            step()

    for name in ("fsync", "write", "replace"):
        original = getattr(os, name)

        def patched(*arguments: object, original: Callable[..., object] = original) -> object:
            step()
            return original(*arguments)

        setattr(os, name, patched)
    sys.addaudithook(watch)


def run_killed(work: Callable[[], None], *, at: int = 0, after: float = 0.0) -> bool:
    """Fork, run `work`, kill it before disk operation `at` (from 1) or after some seconds.

    True when it finished by itself.

    Raises AssertionError when the work itself fails.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if at:
                _count_down(at)
            if after:
                signal.setitimer(signal.ITIMER_REAL, after)
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the work failed"
    return True
