"""What a manifest notes beside tensors, held against the kinds that its readers take for granted.

A digest proves that nobody changed a manifest by accident; who writes one by hand makes its digest, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmtrain.run.checkpoints.manifest import CheckpointInfo

DEGREES = ("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch")
"""Whole numbers from 1 in a layout, where it names them."""
OBJECTS = ("model", "state")


def notes_faults(info: CheckpointInfo) -> list[str]:
    """What is of another kind than any writer of ours leaves; what is missing is no fault."""
    found = []
    rate = info.extra.get("learning_rate", 0.0)
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not math.isfinite(rate):
        found.append(f"its learning rate is {rate!r:.60}, not a number")
    seed = info.extra.get("seed", 0)
    if not _is_whole(seed):
        found.append(f"its seed is {seed!r:.60}, not a whole number")
    found += [
        f"its {name} is not an object"
        for name in OBJECTS
        if not isinstance(info.extra.get(name) or {}, Mapping)
    ]
    for name in DEGREES:
        degree = info.layout.get(name, 1)
        if not _is_whole(degree) or degree < 1:
            found.append(f"{name} of its layout is {degree!r:.60}, not a whole number from 1")
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
