"""CPU-seconds a token of the engine, as a ratio to a plain PyTorch loop; `python -m tests.bench.engine_cpu
[--rounds N] [--profile]`.

Workload: Llama-style, 6.6M parameters, hidden 256, 8 layers, 8 heads, SwiGLU 688, vocabulary 512, untied
head, 256 tokens, global batch 16, micro-batch 2, BF16. Every round runs the plain loop, then each layout,
all ranks with one thread; user+system time of all ranks in the timed steps counts. Medians over rounds. One
round warms up three steps and times ten. `--profile` says instead where rank 0's time goes, by kinds of
operations; the profiler itself slows what is small, so shares are rough.
"""

from __future__ import annotations

import argparse
import re
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from llmtrain.config.data import DataConfig
from llmtrain.config.layout import Layout
from llmtrain.config.numerics import LearningRateConfig
from llmtrain.config.recipe import BatchConfig, Recipe, TrainConfig
from llmtrain.corpus.corpora import training_samples
from llmtrain.engine.build import build_parts
from llmtrain.engine.data import TrainingBatches
from llmtrain.engine.device import choose_device
from llmtrain.engine.state import state_pieces
from llmtrain.engine.step import Wishes, train_step
from tests.support.engine_cases import ZipfWindows, llama
from tests.support.plain_loop import PlainTraining
from tests.support.ranks import run_ranks

WARM, TIMED = 3, 10
PATIENCE = 1800.0
"""Seconds that one run may take; a busy machine is slow, but CPU-seconds still count."""
NATIVE = " torch"
"""End of the name of a layout that runs on PyTorch's own parts (`tests/bench/torch_native.py`)."""
LAYOUTS: dict[str, tuple[Layout, float | None]] = {
    "one rank": (Layout(micro_batch=2), 1.03),
    "dp2 zero1": (Layout(dp=2, micro_batch=2), 1.08),
    "pp2": (Layout(pp=2, micro_batch=2), 1.05),
    "tp2": (Layout(tp=2, micro_batch=2), 1.6),
    "tp2 sp": (Layout(tp=2, sequence_parallel=True, micro_batch=2), None),
    f"dp2 tp2 pp2{NATIVE}": (Layout(dp=2, tp=2, pp=2, micro_batch=2), None),
    "dp2 tp2 pp2": (Layout(dp=2, tp=2, pp=2, micro_batch=2), 1.6),
    "dp2 tp2 pp2 sp": (Layout(dp=2, tp=2, pp=2, sequence_parallel=True, micro_batch=2), 2.0),
}
"""Name -> layout and the bar to stay under."""


def bench_recipe() -> Recipe:
    """The workload."""
    model = llama(
        layers=8, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn_hidden=688, vocab=512, sequence=256
    )
    return Recipe(
        name="bench",
        model=model,
        data=DataConfig(validation_every=0),
        batch=BatchConfig(global_size=16),
        learning_rate=LearningRateConfig(peak=1e-3, schedule="constant"),
        train=TrainConfig(steps=WARM + TIMED, seed=1),
    )


def windows() -> ZipfWindows:
    """Zipf-distributed tokens."""
    return ZipfWindows(tokens=200_000, vocab=512, pairs=False)


def cpu_seconds() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_engine(
    rank: int, world_size: int, layout: Layout, timed: int
) -> tuple[float, list[float], list[float]]:
    """CPU-seconds of the timed steps, their wall seconds, and all losses."""
    parts = build_parts(
        bench_recipe(), layout, rank, choose_device(0, "cpu"), train=[windows()], validation=[]
    )
    parts.buckets.initialise(1)
    losses, walls, spent = [], [], 0.0
    for step in range(1, WARM + timed + 1):
        before = cpu_seconds()
        result = train_step(parts, step, Wishes())
        losses.append(result.loss)
        if step > WARM:
            spent += cpu_seconds() - before
            walls.append(result.seconds)
    return spent, walls, losses


def initial_weights() -> dict[str, torch.Tensor]:
    """Every logical tensor of the bench's model as the seed gives it, FP32, by name."""
    parts = build_parts(
        bench_recipe(), Layout(micro_batch=2), 0, choose_device(0, "cpu"), train=[windows()], validation=[]
    )
    parts.buckets.initialise(1)
    torch.use_deterministic_algorithms(False)
    return {
        piece.key.removesuffix("/master"): piece.data.clone()
        for piece in state_pieces(parts.buckets, parts.groups)
        if piece.key.endswith("/master")
    }


def run_native(
    rank: int, world_size: int, layout: Layout, timed: int
) -> tuple[float, list[float], list[float]]:
    """The same for what PyTorch itself offers."""
    from tests.bench.torch_native import NativeTraining, time_native

    recipe = bench_recipe()
    training = NativeTraining(recipe, initial_weights(), layout)
    samples = training_samples([windows()], recipe)
    batches = TrainingBatches(samples, recipe.batch, layout, replica=training.replica)
    return time_native(training, batches.fetch, range(WARM + 1, WARM + timed + 1), cpu_seconds)


KINDS = {
    "matrix products": r"^aten::(mm|addmm|bmm|baddbmm)$",
    "attention": r"attention",
    "optimizer": r"adamw|_foreach",
    "embedding and loss": r"embedding|gather|scatter|amax|exp|log|index",
    "copies and formats": r"copy_|_to_copy|clone|fill_|zero_|empty|cat$",
    "views": r"view|transpose|permute|^aten::t$|expand|slice|select|split|chunk|as_strided|detach|narrow",
    "other element-wise": r"^aten::",
}
"""Kind of operation -> its names; the first that fits counts."""


def profile_engine(rank: int, world_size: int, layout: Layout, timed: int) -> dict[str, float]:
    """Share of the timed steps of a rank by kind of operation; the rest is Python, autograd, the profiler and
    waiting for other ranks. Wall time: on a busy machine all shares grow alike."""
    parts = build_parts(
        bench_recipe(), layout, rank, choose_device(0, "cpu"), train=[windows()], validation=[]
    )
    parts.buckets.initialise(1)
    for step in range(1, WARM + 1):
        train_step(parts, step, Wishes())
    started = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for step in range(WARM + 1, WARM + timed + 1):
            train_step(parts, step, Wishes())
        total = time.perf_counter() - started
    shares = dict.fromkeys(KINDS, 0.0)
    for entry in found.key_averages():
        kind = next((name for name, names in KINDS.items() if re.search(names, entry.key)), None)
        if kind is not None:
            shares[kind] += entry.self_cpu_time_total / 1e6 / total
    return {**shares, "the rest": 1.0 - sum(shares.values())}


def print_profile(layout: Layout, folder: Path, steps: int) -> None:
    """Print the table of one layout."""
    shares = run_ranks(profile_engine, layout.world_size, folder, layout, steps, timeout=PATIENCE)[0]
    told = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    sys.stdout.write(f"{told}\n")


def run_plain(rank: int, world_size: int, timed: int) -> tuple[float, list[float], list[float]]:
    """The same for the plain loop."""
    recipe, initial = bench_recipe(), initial_weights()
    batches = TrainingBatches(
        training_samples([windows()], recipe), recipe.batch, Layout(micro_batch=2), replica=0
    )
    training = PlainTraining(recipe, initial, 2)
    losses, walls, spent = [], [], 0.0
    for step in range(1, WARM + timed + 1):
        before, started = cpu_seconds(), time.perf_counter()
        batch = batches.fetch(step)
        losses.append(training.step(step, batch.tokens, batch.targets)[0])
        if step > WARM:
            spent += cpu_seconds() - before
            walls.append(time.perf_counter() - started)
    return spent, walls, losses


def main() -> int:
    """Print the table; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=TIMED, help="timed steps of a run")
    parser.add_argument("--profile", action="store_true", help="where the time goes, no ratios")
    parser.add_argument("--only", default="", help="comma-separated names of layouts")
    arguments = parser.parse_args()
    chosen = {
        name: value
        for name, value in LAYOUTS.items()
        if not arguments.only or name in arguments.only.split(",")
    }
    if arguments.profile:
        with tempfile.TemporaryDirectory() as folder:
            for name, (layout, _) in chosen.items():
                if not name.endswith(NATIVE):
                    sys.stdout.write(f"{name}: ")
                    print_profile(layout, Path(folder), arguments.steps)
        return 0
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    walls: dict[str, list[float]] = {name: [] for name in chosen}
    distances: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            ((plain_cpu, plain_walls, plain_losses),) = run_ranks(
                run_plain, 1, Path(folder), arguments.steps, timeout=PATIENCE
            )
            for name, (layout, _) in chosen.items():
                function = run_native if name.endswith(NATIVE) else run_engine
                results: list[Any] = run_ranks(
                    function, layout.world_size, Path(folder), layout, arguments.steps, timeout=PATIENCE
                )
                ratios[name].append(sum(spent for spent, _, _ in results) / plain_cpu)
                walls[name].append(statistics.median(results[0][1]) / statistics.median(plain_walls))
                distances[name] = max(abs(a - b) for a, b in zip(results[0][2], plain_losses, strict=True))
            tokens = arguments.steps * 16 * 256
            sys.stdout.write(f"plain: {plain_cpu / tokens * 1000:.3f} cpu s/ktok\n")
            sys.stdout.flush()
    missed = False
    sys.stdout.write(
        f"{'layout':18} {'cpu x':>6} {'min':>6} {'max':>6} {'bar':>5} {'wall x':>7} {'loss distance':>14}\n"
    )
    for name, (_, bar) in chosen.items():
        middle = statistics.median(ratios[name])
        missed |= bar is not None and middle > bar
        sys.stdout.write(
            f"{name:18} {middle:6.2f} {min(ratios[name]):6.2f} {max(ratios[name]):6.2f} {bar or '-':>5} "
            f"{statistics.median(walls[name]):7.2f} {distances[name]:14.5f}\n"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
