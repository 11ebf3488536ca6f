"""Which window of the corpus a global sample is: a pure function of (seed, sample), the same on every rank
and layout.

Each epoch visits every window exactly once, in an order drawn from (seed, epoch). The order is a balanced
Feistel network over the smallest even-width binary domain that holds all windows, with cycle walking back
into the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): constant memory, and on
average fewer than four network evaluations a sample. The order is part of what a checkpoint means:
`tests/corpus/test_sampling.py` pins it.
"""

from __future__ import annotations

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
