"""From checksums of parameters that should be identical to the ranks that are wrong. Pure.

The parameters of a bucket are cut into one region a replica. Every replica tells a checksum of each region of
its compute weights, and, for the regions whose FP32 masters it keeps, of what those masters say the weights
should be. With sharded masters (ZeRO) a region has one owner; without, every replica owns all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """What one replica tells."""

    held: tuple[int, ...]
    """Of each region of its compute weights."""
    owned: Mapping[int, int]
    """Region -> what its own masters say."""
    independent: bool = True
    """Whether masters and compute weights are different memory: in FP32 they are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """One region that is not the same everywhere."""

    region: int
    members: tuple[int, ...]
    """Replicas that are wrong, or, when nobody can say, all that differ."""
    part: str
    """weights | master | unknown"""


def convict(replicas: Sequence[Checksums]) -> tuple[Suspicion, ...]:
    """Who is wrong, region by region."""
    found = (_judge(region, replicas) for region in range(len(replicas[0].held)))
    return tuple(suspicion for suspicion in found if suspicion is not None)


def _judge(region: int, replicas: Sequence[Checksums]) -> Suspicion | None:
    held = [replica.held[region] for replica in replicas]
    truths = {
        index: replica.owned[region] for index, replica in enumerate(replicas) if region in replica.owned
    }
    if len({*held, *truths.values()}) == 1:
        return None
    at_odds = tuple(index for index, truth in truths.items() if held[index] != truth)
    if len(truths) > 1 and at_odds:  # Everybody knows what is right; these hold something else.
        return Suspicion(region=region, members=at_odds, part="weights")
    witness = len(truths) == 1 and all(replicas[index].independent for index in truths)
    if len(replicas) == 1:
        return Suspicion(region=region, members=(0,), part="weights")
    votes = Counter(held) + Counter(truths.values() if witness else ())
    (value, count), *others = votes.most_common()
    if others and others[0][1] == count:
        return Suspicion(region=region, members=tuple(range(len(replicas))), part="unknown")
    wrong = tuple(index for index, other in enumerate(held) if other != value)
    if wrong:
        return Suspicion(region=region, members=wrong, part="weights" if witness else "master")
    return Suspicion(region=region, members=tuple(truths), part="master")
