"""Activation memory and step time of `parallel.recompute`; `python -m tests.bench.recompute_memory`.

Memory: bytes of all storages that are alive after the forward pass of a micro-batch, weights left out, and
the peak of forward and backward pass, counted at every operation. Time: CPU-seconds of a step, from
alternating runs in one process. The head and its loss, which recomputation does not touch, are a part of peak
and time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.config.layout import Layout, Recompute
from llmtrain.engine.build import Parts, build_parts
from llmtrain.engine.device import choose_device
from llmtrain.engine.step import Wishes, train_step
from llmtrain.engine.verify_plan import LiveBytes
from tests.bench.engine_cpu import bench_recipe, windows

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
BARS: dict[str, tuple[float, float]] = {"selective": (0.40, 0.15), "full": (0.40, 0.35)}
"""Mode -> share of activation memory that it must save at least, and of time that it may add at most."""


def build(mode: Recompute, layers: int, sequence: int) -> Parts:
    """The bench's model on one rank."""
    recipe = bench_recipe()
    model = replace(recipe.model, layers=layers, sequence=sequence)
    recipe = replace(recipe, model=model, batch=replace(recipe.batch, global_size=4))
    layout = Layout(micro_batch=2, recompute=mode)
    parts = build_parts(recipe, layout, 0, choose_device(0, "cpu"), train=[windows()], validation=[])
    parts.buckets.initialise(1)
    return parts


def counter_of(parts: Parts) -> LiveBytes:
    """Counts live bytes beside weights and gradients, which are there all the time."""
    counter = LiveBytes()
    for bucket in parts.buckets.buckets:
        for tensor in (bucket.parameters, bucket.gradients, bucket.own):
            if tensor is not None:
                counter.ignore(tensor)
    for table in parts.stages[0].table or ():
        counter.ignore(table)
    return counter


def kept_bytes(parts: Parts) -> int:
    """Bytes that are kept of one micro-batch between its forward and its backward pass."""
    stage, model = parts.stages[0], parts.recipe.model
    tokens = torch.zeros(parts.layout.micro_batch, model.sequence, dtype=torch.int64)
    counter = counter_of(parts)
    with counter:
        hidden: Tensor = stage(tokens)
        kept = counter.now
    del hidden
    return kept


def peak_bytes(parts: Parts) -> int:
    """Peak bytes of live tensors that a whole forward and backward pass makes."""
    batch = parts.batches.fetch(1)
    parts.buckets.begin_step(parts.batches.micro_batches, parts.batches.busiest)
    counter = counter_of(parts)
    with counter:
        parts.passes.train(batch.tokens, batch.targets, 1.0, batch.positions)
    return counter.peak


def main() -> int:
    """Print the table; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = {mode: build(mode, arguments.layers, arguments.sequence) for mode in MODES}
    kept = {mode: kept_bytes(parts) for mode, parts in made.items()}
    peak = {mode: peak_bytes(parts) for mode, parts in made.items()}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for step in range(1, arguments.rounds + 2):
        for mode, parts in made.items():
            started = time.process_time()
            train_step(parts, step, Wishes())
            times[mode].append(time.process_time() - started)
    missed = False
    sys.stdout.write(
        f"{'recompute':10} {'kept MiB':>9} {'saved':>7} {'peak MiB':>9} {'saved':>7} {'time':>7}\n"
    )
    for mode in MODES:
        ratios = [own / none for own, none in zip(times[mode][1:], times["none"][1:], strict=True)]
        saved, more = 1.0 - kept[mode] / kept["none"], statistics.median(ratios) - 1.0
        least, most = BARS.get(mode, (0.0, 1.0))
        missed |= saved < least or more > most
        sys.stdout.write(
            f"{mode:10} {kept[mode] / 2**20:9.1f} {100 * saved:6.1f}% {peak[mode] / 2**20:9.1f} "
            f"{100 * (1.0 - peak[mode] / peak['none']):6.1f}% {100 * more:+6.1f}%\n"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
