"""Predicted and measured steps of the tiny recipe on this machine's cores, at twelve layouts:
`python -m tests.bench.own_engine [--steps N] [--given N]`.

Measures every layout, all ranks with one thread; calibrates as `profiles calibrate` does, once from the
micro-benchmark alone and once from some of the layouts as well; and prints the errors of both. Also counts
the bytes of live tensors on the fullest rank beside the predicted ones. A step on a machine that does other
work is slower by what the others take: run it on a quiet one. Exits 1 when a layout that was not given is
more than 10 % off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmtrain.cli.plan_views.summary import layout_words
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.config.recipe import Recipe
from llmtrain.engine.build import build_parts
from llmtrain.engine.device import choose_device
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


def train(rank: int, world_size: int, recipe: Recipe, layout: Layout, steps: int) -> tuple[list[float], int]:
    """Seconds of a rank's steps, and the most bytes of tensors that it held."""
    windows = ZipfWindows(tokens=200_000, vocab=recipe.model.vocab, pairs=False)
    parts = build_parts(recipe, layout, rank, choose_device(0, "cpu"), train=[windows], validation=[])
    parts.buckets.initialise(1)
    seconds = [train_step(parts, step, Wishes()).seconds for step in range(1, WARM + steps + 1)][WARM:]
    counter = LiveBytes()
    for bucket in parts.buckets.buckets:
        held = (bucket.parameters, bucket.gradients, bucket.reduced, bucket.master, bucket.own)
        for tensor in (*held, bucket.exp_avg, bucket.exp_avg_sq):
            if tensor is not None:
                counter.add(tensor)
    with counter:
        train_step(parts, WARM + steps + 1, Wishes())
    return seconds, counter.peak


def measure(recipe: Recipe, layouts: Sequence[Layout], steps: int) -> list[tuple[Layout, float, int]]:
    """Every layout's median step and its fullest rank's bytes."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in layouts:
            results = run_ranks(train, layout.world_size, Path(folder), recipe, layout, steps, timeout=600.0)
            found.append((layout, statistics.median(results[0][0]), max(peak for _, peak in results)))
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
    steps = [step(cluster=cluster, layout=layout, seconds=seconds) for layout, seconds, _ in found]
    given = steps[:: max(1, len(steps) // arguments.given)][: arguments.given]
    constants = calibrated(cluster, fit(given), date="today", evidence="steps")
    fitted = replace(cluster, calibration=constants)
    model = MemoryModel(make_workload(recipe), make_machine(cluster))
    sys.stdout.write(f"{'layout':44} measured   rates   steps   bytes counted, predicted\n")
    missed = 0
    for (layout, seconds, counted), one in zip(found, steps, strict=True):
        rates = predict(one) / seconds - 1
        after = predict(replace(one, cluster=fitted)) / seconds - 1
        told = model.fullest(layout, busiest(layout, recipe.batch.global_size)).allocated
        mark = "given" if one in given else ("MISSED" if abs(after) > BAR else "")
        missed += mark == "MISSED"
        name = f"{layout_words(layout)} micro{layout.micro_batch}"
        sys.stdout.write(
            f"{name:44} {1e3 * seconds:6.0f} ms {100 * rates:+6.1f}% {100 * after:+6.1f}% "
            f"{counted:12,d} {100 * (told / counted - 1):+6.1f}% {mark}\n"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
