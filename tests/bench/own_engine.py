"""Predicted and measured steps of the tiny recipe on this machine's cores, at twelve layouts:
`python -m tests.bench.own_engine [--steps N] [--given N]`.

Measures every layout, all ranks with one thread; calibrates as `profiles calibrate` does, once from the
micro-benchmark alone and once from some of the layouts as well; and prints the errors of both. Also counts
the bytes of live tensors on the fullest rank beside the predicted ones; what collectives need for themselves
(slots in shared memory, which their ranks map together, and what gloo receives) is part of a process's
context in the plan, and counted apart. A step on a machine that does other
work is slower by what the others take: run it on a quiet one. Exits 1 when a layout that was not given is
more than 10 % off, or the bytes of any more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from llmtrain.cli.plan_views.summary import layout_words
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.engine.build import build_parts
from llmtrain.engine.device import choose_device
from llmtrain.engine.parallel.groups import Group, Pending
from llmtrain.engine.step import Wishes, train_step
from llmtrain.engine.verify_plan import LiveBytes
from llmtrain.plan.calibrate import MeasuredStep, calibrated, fit, from_rates, predict
from llmtrain.plan.evaluate import busiest
from llmtrain.plan.machine import make_machine
from llmtrain.plan.memory.model import MemoryModel
from llmtrain.plan.workload import make_workload
from tests.support.engine_cases import ZipfWindows
from tests.support.ranks import run_ranks

WARM = 3
BAR = 0.10
MEMORY_BAR = 0.02
LAYOUTS = (
    Layout(micro_batch=2),
    Layout(micro_batch=8),
    Layout(dp=2, micro_batch=2),
    Layout(dp=2, zero=1, micro_batch=4),
    Layout(dp=4, zero=1, micro_batch=2),
    Layout(tp=2, micro_batch=2),
    Layout(tp=2, sequence_parallel=True, micro_batch=4),
    Layout(pp=2, micro_batch=2),
    Layout(pp=4, micro_batch=2),
    Layout(dp=2, pp=2, micro_batch=2),
    Layout(dp=2, tp=2, micro_batch=2, recompute="full"),
    Layout(dp=2, tp=2, pp=2, micro_batch=2),
)


class RankBytes(LiveBytes):
    """Counts live bytes without those that collectives take for themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_communicating = False
        self.most_apart = self._apart = 0
        self._storages_apart: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it dies."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages_apart:
            return
        if not self.is_communicating or key in self._known:
            super().add(tensor)
            return
        self._storages_apart.add(key)
        self._apart += size
        self.most_apart = max(self.most_apart, self._apart)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._storages_apart.discard(key)
        self._apart -= size

    def marked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose new tensors are those of a collective."""

        @wraps(call)
        def wrapped(*arguments: Any) -> Any:
            before, self.is_communicating = self.is_communicating, True
            try:
                return call(*arguments)
            finally:
                self.is_communicating = before

        return wrapped


def train(
    rank: int, world_size: int, recipe: Recipe, layout: Layout, steps: int
) -> tuple[list[float], int, int]:
    """Seconds of a rank's steps, and the most bytes of tensors that it held: its own, its collectives'."""
    windows = ZipfWindows(tokens=200_000, vocab=recipe.model.vocab, pairs=False)
    parts = build_parts(recipe, layout, rank, choose_device(0, "cpu"), train=[windows], validation=[])
    parts.buckets.initialise(1)
    seconds = [train_step(parts, step, Wishes()).seconds for step in range(1, WARM + steps + 1)][WARM:]
    counter = RankBytes()
    for owner, name in ((Group, "start_all_reduce"), (Group, "start_reduce_scatter"), (Pending, "wait")):
        setattr(owner, name, counter.marked(getattr(owner, name)))
    for bucket in parts.buckets.buckets:
        held = (bucket.parameters, bucket.gradients, bucket.reduced, bucket.master, bucket.own)
        for tensor in (*held, bucket.exp_avg, bucket.exp_avg_sq):
            if tensor is not None:
                counter.add(tensor)
    with counter:
        train_step(parts, WARM + steps + 1, Wishes())
    return seconds, counter.peak, counter.most_apart


def measure(recipe: Recipe, layouts: Sequence[Layout], steps: int) -> list[tuple[Layout, float, int, int]]:
    """Every layout's median step, its fullest rank's bytes, and the most that its collectives took."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in layouts:
            results = run_ranks(train, layout.world_size, Path(folder), recipe, layout, steps, timeout=600.0)
            peak, apart = (max(result[place] for result in results) for place in (1, 2))
            found.append((layout, statistics.median(results[0][0]), peak, apart))
    return found


def benchmarked(cluster: ClusterProfile) -> ClusterProfile:
    """The profile with the rates of this machine."""
    command = [sys.executable, "-m", "llmtrain.engine.microbench"]
    rates = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    numbers = {name: value for name, value in rates.items() if isinstance(value, float)}
    return replace(cluster, calibration=from_rates(cluster, numbers, date="today", evidence="rates"))


def main() -> int:
    """Print the table; 1 when a layout is too far off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--given", type=int, default=3, help="layouts to calibrate with, spread over the table"
    )
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="only so many of the table")
    arguments = parser.parse_args()
    job = resolve("tiny", "local", {})
    recipe, cluster = job.recipe, benchmarked(job.cluster)
    found = measure(recipe, LAYOUTS[: arguments.layouts], arguments.steps)
    step = partial(MeasuredStep, recipe=recipe)
    steps = [step(cluster=cluster, layout=layout, seconds=seconds) for layout, seconds, *_ in found]
    given = steps[:: max(1, len(steps) // arguments.given)][: arguments.given]
    constants = calibrated(cluster, fit(given), date="today", evidence="steps")
    fitted = replace(cluster, calibration=constants)
    model = MemoryModel(make_workload(recipe), make_machine(cluster))
    sys.stdout.write(f"{'layout':44} measured   rates   steps   bytes counted, predicted, collectives'\n")
    missed = 0
    for (layout, seconds, counted, apart), one in zip(found, steps, strict=True):
        rates = predict(one) / seconds - 1
        after = predict(replace(one, cluster=fitted)) / seconds - 1
        told = model.fullest(layout, busiest(layout, recipe.batch.global_size)).allocated
        mark = "given" if one in given else ("MISSED" if abs(after) > BAR else "")
        missed += mark == "MISSED" or abs(told / counted - 1) > MEMORY_BAR
        name = f"{layout_words(layout)} micro{layout.micro_batch}"
        sys.stdout.write(
            f"{name:44} {1e3 * seconds:6.0f} ms {100 * rates:+6.1f}% {100 * after:+6.1f}% "
            f"{counted:12,d} {100 * (told / counted - 1):+6.1f}% {apart:10,d} {mark}\n"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
