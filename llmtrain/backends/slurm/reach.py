"""Is SLURM there? Asked before anything is written, with every try said, and none that cannot help."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmtrain.backends.slurm.calls import SlurmCalls
from llmtrain.backends.slurm.refusals import SlurmSlowError, SlurmUnknownError, SlurmUnreachableError

TRIES = 3
"""For a controller that is just being started again."""
PAUSE_SECONDS = 2.0
SLOW_SECONDS = 2.0
"""A call that takes longer is told of while it lasts."""
_log = logging.getLogger(__name__)


def known_partitions(calls: SlurmCalls) -> list[str]:
    """Names of all partitions; [] when they are not told in time by a controller that is up. Raises
    SlurmError when the controller does not answer, or is not known."""
    for number in range(1, TRIES + 1):
        try:
            with told_when_slow(f"asking SLURM for its partitions (sinfo), at most {calls.timeout:g} s"):
                return calls.partitions()
        except SlurmUnknownError:
            raise  # The command itself has tried for long.
        except SlurmSlowError as error:
            with told_when_slow(f"{error}; asking whether SLURM is up at all (scontrol ping)"):
                if not calls.controller_answers():
                    raise
            _log.warning("%s; the partition is left for sbatch to judge", error)
            return []
        except SlurmUnreachableError as error:
            if number == TRIES or not error.problems[0].may_pass:
                raise
            _log.warning("%s; try %d of %d follows", error, number + 1, TRIES)
            time.sleep(PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


@contextmanager
def told_when_slow(what: str) -> Iterator[None]:
    """Say what is waited for, when it takes longer than a moment."""
    timer = threading.Timer(SLOW_SECONDS, _log.warning, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
