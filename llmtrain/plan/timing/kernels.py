"""Seconds of the three kinds of kernels that a training step is made of: matrix products, attention,
streaming passes.

A matrix product of M x N x K is cut into tiles that the multiprocessors work on in waves; the last wave is
partly
empty, small tiles run below the ceiling, and each tile pays for filling its pipeline (`_FILL` steps along K).
The
constants here and in the hardware table were fitted jointly to published runs of eight sources; nothing
belongs to one
source (tests/bench/planner_accuracy.py prints the errors by source).
"""

from __future__ import annotations

from math import ceil

from llmtrain.plan.machine import Machine

_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_LARGEST_TILE = 256 * 128
_FILL = 250.0
"""Steps along K whose time a tile spends on filling its pipeline and writing its result, at an A100's rate.
"""
_FILL_RATE = 312e12 / 108
"""FLOP/s of one multiprocessor of an A100: filling takes the same time on a faster one."""
_FILL_GROWTH = 0.86
"""Exponent of that: a faster one fills somewhat faster, too."""
_SMALL_TILE_LOSS = 0.75
"""Share of the ceiling that a vanishing tile would lose against the largest one."""
_BACKWARD_SHARE = 0.70
"""Rate of the backward attention kernel against the forward one."""
_SHORT_KEYS = 139.0
"""Keys at which a fused attention kernel reaches half of its rate."""
_ALIGNED = ((64, 1.0), (16, 0.95), (8, 0.85), (4, 0.30), (2, 0.17), (1, 0.10))
"""Rate of a product whose inner dimensions are multiples of so many elements and no more."""
_ROW_SCALED = 0.65
"""Rate of FP8 products with one scale a row against one scale a tensor."""
_NARROW_LOSS = {"flash1": 0.1, "flash2": 0.45, "flash3": 0.45}
"""Share of its rate that a kernel loses on heads of vanishing width against 128; the first were nearly as
fast on heads of 64."""
_QUERY_BLOCK = 128
"""Query rows that one thread block of a fused attention kernel owns."""
_CPU_NARROW_LOSS = 0.3
"""The same as `_NARROW_LOSS` of torch's CPU kernel."""
_CPU_KEYS = (45.0, 1300.0)
"""Keys at which torch's CPU kernel reaches half of its rate, forward and, in half precision, backward: that
one has much to set up."""
_CPU_BACKWARD = (0.95, 3.2)
"""Rate of its backward pass over very many keys against the forward one: in FP32, in half precision."""


class Kernels:
    """Kernel times on one machine in one precision mode; results are remembered."""

    def __init__(self, machine: Machine, mode: str) -> None:
        accelerator = machine.accelerator
        self._machine = machine
        self._half = mode in ("bf16", "fp16", "fp8")
        self._element = 2 if self._half else 4
        self.peak = accelerator.peak(mode)
        self._plain_peak = accelerator.peak("bf16" if mode == "fp8" else mode)
        self._fp8 = mode == "fp8"
        self._units = accelerator.multiprocessors
        self._gap = machine.launch_gap
        self._bandwidth = machine.memory_bandwidth
        self._plain_rate = self._plain_peak * machine.gemm
        self._fp8_rate = self.peak * accelerator.fp8_ceiling * machine.gemm / accelerator.gemm_ceiling
        self._fp8_rate *= machine.fp8
        if machine.software.fp8_scaling == "row":
            self._fp8_rate *= _ROW_SCALED
        kernels = ("flash1", "flash2", "flash3")
        fused = machine.software.attention
        share = accelerator.attention[kernels.index(fused)] if fused in kernels else 0.0
        self._attention_share = share * machine.attention
        self._narrow_loss = _NARROW_LOSS.get(fused, 0.0)
        self._batches: dict[tuple[int, int, int, int], float] = {}
        self._remembered: dict[tuple[int, int, int, int, bool, bool], float] = {}

    def stream(self, moved: float, kernels: float = 1.0) -> float:
        """Seconds of `kernels` passes that move `moved` bytes through device memory altogether."""
        return moved / self._bandwidth + kernels * self._gap

    def product(
        self,
        m: float,
        n: float,
        k: float,
        *,
        accumulate: bool = False,
        linear: bool = True,
        groups: int = 1,
    ) -> float:
        """Seconds of an (m x k) by (k x n) product; `accumulate`: the result is added to FP32 gradients.

        `linear` products run in FP8 when the mode says so; the others (head, unfused attention) never do.
        `groups`: equal products of one kernel (a mixture's experts), whose tiles share the waves.
        """
        key = (ceil(m), ceil(n), ceil(k), groups, accumulate, linear and self._fp8)
        seconds = self._remembered.get(key)
        if seconds is None:
            seconds = self._remembered[key] = self._product(key[:4], *key[4:])
        return seconds

    def _product(self, sizes: tuple[int, int, int, int], accumulate: bool, fp8: bool) -> float:
        m, n, k, groups = sizes
        size = 1 if fp8 else self._element
        moved = size * (m * k + k * n) + (8 if accumulate else self._element) * m * n
        memory = groups * moved / self._bandwidth
        rate = self._fp8_rate if fp8 else self._plain_rate
        if self._units == 1:  # no kernel adds to the gradients by itself: the product is stored, and read
            stored = 2 * size * groups * m * n / self._bandwidth if accumulate else 0.0
            return 2.0 * groups * m * n * k / rate + memory + stored + self._gap
        rate *= _alignment(m, n) if accumulate else _alignment(n, k)
        compute = self._tiled(sizes, rate / self._units, self._fill(fp8))
        joint = float((compute**4 + memory**4) ** 0.25)
        return joint + (0.2 * memory if accumulate else 0.0) + self._gap

    def _fill(self, fp8: bool) -> float:
        peak = self.peak if fp8 else self._plain_peak
        return float(_FILL * (peak / self._units / _FILL_RATE) ** _FILL_GROWTH)

    def _tiled(self, sizes: tuple[int, int, int, int], rate: float, fill: float) -> float:
        """Seconds of the best tile and split along k; `rate`: FLOP/s of one multiprocessor at the ceiling."""
        (m, n, k, groups), best = sizes, float("inf")
        for rows, columns in _TILES:
            area = rows * columns
            speed = rate * (1.0 - _SMALL_TILE_LOSS * (1.0 - area / _LARGEST_TILE))
            tiles = groups * ceil(m / rows) * ceil(n / columns)
            for split in (1, 2, 4):
                if split > 1 and k < 512 * split:
                    break
                waves = ceil(tiles * split / self._units)
                seconds = waves * 2.0 * area * (k / split + fill) / speed
                if split > 1:
                    seconds += 8.0 * groups * m * n * split / self._bandwidth
                best = min(best, seconds)
        return best

    def attention(
        self, heads: float, rows: float, keys: float, width: int, batch: int
    ) -> tuple[float, float]:
        """Seconds forward and backward of fused causal attention of `rows` queries over `keys` keys on this
        rank.
        """
        flops = 2.0 * batch * heads * rows * keys * width  # two products, half of the square
        share = self._attention_share
        blocks = batch * heads * ceil(rows / _QUERY_BLOCK)
        waves = blocks / self._units
        filled = waves / ceil(waves) if waves < 8 else 1.0
        narrow = min(1.0, 1.0 - self._narrow_loss * (1.0 - width / 128))
        if self._units == 1:
            return self._attention_on_cpu(flops, keys, width)
        speed = self._plain_peak * filled * narrow * (keys / (keys + _SHORT_KEYS))
        return (
            flops / (speed * share) + self._gap,
            2.5 * flops / (speed * share * _BACKWARD_SHARE) + 3 * self._gap,
        )

    def _attention_on_cpu(self, flops: float, keys: float, width: int) -> tuple[float, float]:
        """The same of torch's CPU kernel."""
        narrow = min(1.0, 1.0 - _CPU_NARROW_LOSS * (1.0 - width / 128))
        speed = self._machine.accelerator.bf16_flops * self._attention_share * narrow  # FP32 is as fast
        short = _CPU_KEYS[0]
        forward = flops / speed * (1.0 + short / keys)
        more = _CPU_KEYS[1] if self._half else short
        backward = 2.5 * flops / (speed * _CPU_BACKWARD[self._half]) * (1.0 + more / keys)
        return forward + self._gap, backward + self._gap

    def scores(self, heads: float, rows: float, keys: float, width: int, batch: int) -> tuple[float, float]:
        """Seconds forward and backward of unfused attention: batched products and passes over the score
        matrix.
        """
        instances = batch * heads
        scores = instances * rows * keys
        product = self._batched(instances, rows, keys, width)
        context = self._batched(instances, rows, width, keys)
        element = self._element
        forward = (
            product + context + self.stream(2 * element * scores) + self.stream((2 * element + 1) * scores)
        )
        backward = 2 * (product + context)
        backward += self.stream((2 * element + 1) * scores) + self.stream(3 * element * scores)
        return forward, backward

    def _batched(self, instances: float, m: float, n: float, k: float) -> float:
        key = (ceil(instances), ceil(m), ceil(n), ceil(k))
        seconds = self._batches.get(key)
        if seconds is None:
            seconds = self._batches[key] = self._batched_product(*key)
        return seconds

    def _batched_product(self, instances: int, m: int, n: int, k: int) -> float:
        memory = instances * self._element * (m * k + k * n + m * n) / self._bandwidth
        if self._units == 1:
            return 2.0 * instances * m * n * k / self._plain_rate + memory + self._gap
        rate = self._plain_rate / self._units * _alignment(n, k)
        fill = self._fill(False)
        best = float("inf")
        for rows, columns in _TILES:
            area = rows * columns
            speed = rate * (1.0 - _SMALL_TILE_LOSS * (1.0 - area / _LARGEST_TILE))
            waves = ceil(instances * ceil(m / rows) * ceil(n / columns) / self._units)
            best = min(best, waves * 2.0 * area * (k + fill) / speed)
        return float((best**4 + memory**4) ** 0.25 + self._gap)


def _alignment(first: int, second: int) -> float:
    for grain, rate in _ALIGNED:
        if first % grain == 0 and second % grain == 0:
            return rate
    return _ALIGNED[-1][1]
