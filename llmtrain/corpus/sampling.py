"""Which window of the corpus a global sample is: a pure function of (seed, sample), the same on every rank
and layout.

Each epoch visits every window exactly once, in an order drawn from (seed, epoch). The order is a balanced
Feistel network over the smallest even-width binary domain that holds all windows, with cycle walking back
into the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): constant memory, and on
average fewer than four network evaluations a sample. The order is part of what a checkpoint means:
`tests/corpus/test_sampling.py` pins it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
ROUNDS = 6


def mix(value: int) -> int:
    """Finalizer of SplitMix64: a bijection on 64-bit words with full avalanche (Steele, Lea, Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class SampleOrder:
    """The order of samples over all epochs; raises ValueError when there is no window or the seed is
    negative."""

    __slots__ = ("_epoch", "_half", "_keys", "seed", "windows")

    def __init__(self, windows: int, seed: int) -> None:
        if windows < 1:
            raise ValueError(f"a corpus of {windows} windows has no sample order")
        if seed < 0:
            raise ValueError(f"seed must not be negative, not {seed}")
        self.windows = windows
        self.seed = seed
        self._half = max(1, ((windows - 1).bit_length() + 1) // 2)
        self._epoch = -1
        self._keys: tuple[int, ...] = ()

    def window(self, sample: int) -> int:
        """Return the window, in 0..windows-1, that global sample 0, 1, 2, ... is; raises ValueError when
        negative."""
        if sample < 0:
            raise ValueError(f"sample must not be negative, not {sample}")
        epoch, position = divmod(sample, self.windows)
        if epoch != self._epoch:
            self._keys = round_keys(self.seed, epoch)
            self._epoch = epoch
        place = self._network(position)
        while place >= self.windows:
            place = self._network(place)
        return place

    def epoch(self, sample: int) -> int:
        """Epoch, from 0, that a sample belongs to."""
        return sample // self.windows

    def _network(self, place: int) -> int:
        half, low = self._half, (1 << self._half) - 1
        left, right = place >> half, place & low
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & low)
        return (left << half) | right


def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Keys of the network's rounds; every bit of seed and epoch reaches each of them."""
    state = 0
    for word in (seed & MASK, seed >> 64 & MASK, epoch & MASK):
        state = mix(state ^ word)
    keys: list[int] = []
    for _ in range(ROUNDS):
        state = mix(state)
        keys.append(state)
    return tuple(keys)


def shuffled(places: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """`SampleOrder(count, seed).window` of many places of its first epoch at once."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = round_keys(seed, 0)
    found = _network(places.astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(found >= count)):
        found[outside] = _network(found[outside], half, keys)
    return found.astype(np.int64)


def _network(places: NDArray[np.uint64], half: int, keys: tuple[int, ...]) -> NDArray[np.uint64]:
    width, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = places >> width, places & low
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & low)
    return (left << width) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of many values; multiplication and addition wrap at 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
