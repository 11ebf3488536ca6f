"""Loss after 300 steps with 8-bit gradients against uncompressed ones, beside what another seed does to it;
`python -m tests.bench.compressed_gradients [--seeds N] [--steps N]`.

A small Llama on two replicas in BF16; runs of one seed alternate. Bar: the mean over seeds of the validation
loss is within 0.5 % of the uncompressed runs'. A single pair of runs differs by more than that either way:
rounding takes the weights along another path, as another seed does, which the last column shows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from llmtrain.config.layout import Layout
from llmtrain.config.recipe import ParallelConfig
from llmtrain.engine.step import Wishes, train_step, validate
from tests.support.engine_cases import Case, build, llama, recipe
from tests.support.ranks import run_ranks

BAR = 0.005
FORMATS = ("fp32", "int8")
LAST = 20
"""Steps that the training loss is the mean of."""


def train(rank: int, world_size: int, seeds: int, steps: int) -> list[dict[str, tuple[float, float]]]:
    """(training loss, validation loss) of each format, for each seed."""
    torch.set_num_threads(1)
    found = []
    for seed in range(seeds):
        row = {}
        for communication in FORMATS:
            made = recipe(llama(), mode="bf16", steps=steps, global_batch=16)
            made = replace(
                made,
                parallel=ParallelConfig(gradient_communication=communication),  # type: ignore[arg-type]
                train=replace(made.train, seed=seed),
                data=replace(made.data, validation_sequences=60),
            )
            parts = build(Case(made, Layout(dp=2, micro_batch=8)), rank)
            losses = [train_step(parts, step, Wishes()).loss for step in range(1, steps + 1)]
            parts.buckets.settle()
            held_out = validate(parts)
            row[communication] = (
                statistics.mean(losses[-LAST:]),
                held_out.loss if held_out is not None else float("nan"),
            )
        found.append(row)
    return found


def main() -> int:
    """Print the table; return 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = run_ranks(train, 2, Path(folder), arguments.seeds, arguments.steps, timeout=3600.0)[0]
    missed = False
    for number, name in enumerate(("training", "validation")):
        plain = [row["fp32"][number] for row in runs]
        ratios = [row["int8"][number] / row["fp32"][number] - 1 for row in runs]
        spread = statistics.stdev(plain) / statistics.mean(plain) if len(plain) > 1 else float("nan")
        missed |= name == "validation" and abs(statistics.mean(ratios)) > BAR
        each = " ".join(f"{100 * ratio:+.2f}%" for ratio in ratios)
        sys.stdout.write(
            f"{name:10} loss {statistics.mean(plain):.4f}, int8 {100 * statistics.mean(ratios):+.2f}% "
            f"({each}); seeds differ by {100 * spread:.2f}%\n"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
