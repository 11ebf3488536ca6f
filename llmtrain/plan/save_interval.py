"""How often to save while a run goes on: from what a save costs and how often runs fail, both measured. Pure.

Young's rule in Daly's form (`reliability.checkpoint_interval`), with the cost of a save that the training
waits for, and a mean time between failures that begins with the profile's and follows the run's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import fmean

from llmtrain.plan.reliability import checkpoint_interval

UNMEASURED = 1800.0
"""Seconds between two saves until one was measured, and where the failure rate is unknown."""
SHORTEST, LONGEST = 60.0, 4 * 3600.0
"""Bounds: neither measured cost nor failure rate is so exact."""
WRITE_FACTOR = 3.0
"""An interval is so many times what writing takes beside the training: no save meets the one before."""
PRIOR_FAILURES = 0.5
"""Failures that the profile's word is worth against the run's own."""
FIRST_SHARE = 0.25
"""Share of the time between failures after which the first save comes at the latest."""
ENOUGH_FAILURES = 3
"""Failures of a run from which on they alone may say that it fails more often than the profile has it."""


def between_failures(node_mtbf: float, nodes: int, failures: int, seconds: float) -> float:
    """Seconds between two failures of a run on so many nodes that has failed so often in so many seconds.

    The mean of a Gamma distribution after Poisson events, that begins at the profile's `node_mtbf / nodes`
    with a weight of half a failure; or, when that is less, what the run's own failures say less a standard
    deviation, so that a bad day counts at once.
    """
    profile = node_mtbf / max(1, nodes)
    blended = (PRIOR_FAILURES * profile + seconds) / (PRIOR_FAILURES + failures)
    own = seconds / (failures - sqrt(failures)) if failures >= ENOUGH_FAILURES and seconds > 0.0 else inf
    return min(blended, own)


def save_interval(stalls: Sequence[float], writes: Sequence[float], between: float) -> float:
    """Seconds between two saves, from the newest saves' costs to the training and times to the commit, and
    the mean time between failures. `UNMEASURED` before any save, or with an unknown (0) failure rate; less
    where the run fails so often that it would rarely come to a save."""
    if between <= 0.0:
        return UNMEASURED
    if not stalls or not writes:
        return min(UNMEASURED, max(SHORTEST, FIRST_SHARE * between))
    wanted = checkpoint_interval(fmean(stalls), between)
    return min(LONGEST, max(SHORTEST, WRITE_FACTOR * fmean(writes), wanted))
