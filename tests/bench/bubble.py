"""Measured pipeline bubble against the schedule's formula; `python -m tests.bench.bubble`.

Four pipeline ranks run the engine's schedules on a tiny model; a pass takes as long as its clock sleeps, so
that two cores do not distort what the schedule does. The figures come from the traces that a run would write.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmtrain.config.layout import Layout
from llmtrain.engine.clock import Clock, TraceFile, trace_place
from llmtrain.engine.device import choose_device
from llmtrain.engine.step import Wishes, train_step
from llmtrain.events.trace import measure_bubbles, read_traces
from llmtrain.plan.timing.schedules import bubble_ratio
from tests.support.engine_cases import Case, build, llama, recipe
from tests.support.ranks import run_ranks

SCHEDULES: dict[str, Layout] = {
    "1f1b": Layout(pp=4, schedule="1f1b"),
    "interleaved": Layout(pp=4, vpp=2, schedule="interleaved"),
    "zero-bubble": Layout(pp=4, schedule="zero-bubble"),
}
MICRO_BATCHES = (4, 8, 16, 32)
GOOD = 0.12
"""Where a formula promises at most this bubble, no more may be measured."""
UNIT = 0.12
"""Seconds of a stage's forward pass; a backward pass takes two, its halves (zero bubble) one each."""


class SleepingClock(Clock):
    """Makes every pass of a stage take a set time, whatever it computes."""

    lengths: dict[str, float]

    def run(self, what: str, stage: int, micro_batch: int, work: Callable[[], Any]) -> Any:
        """Do the work, then sleep for the rest of its time."""

        def stretched() -> Any:
            end = time.perf_counter() + self.lengths[what]
            result = work()
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return super().run(what, stage, micro_batch, stretched)


def pass_lengths(layout: Layout, unit: float) -> dict[str, float]:
    """Seconds of each kind of pass of one chunk. The loss is a part of the last stage's forward pass, so it
    gets no time of its own."""
    chunk = unit / layout.vpp
    backward = chunk if layout.schedule == "zero-bubble" else 2 * chunk
    return {"forward": chunk, "loss": 0.0, "backward": backward, "weight": chunk}


def run_traced(
    rank: int, world_size: int, runs: Sequence[tuple[Layout, int]], unit: float, folder: str
) -> None:
    """Trace the second step of every (layout, micro-batches), each into a folder of its own."""
    for number, (layout, micro_batches) in enumerate(runs):
        case = Case(recipe(llama(layers=8), global_batch=micro_batches * layout.dp, steps=2), layout)
        parts = build(case, rank)
        train_step(parts, 1, Wishes())
        clock = SleepingClock(choose_device(0, "cpu"))
        clock.lengths = pass_lengths(layout, unit)
        parts.passes.clock = clock
        train_step(parts, 2, Wishes())
        place = trace_place(parts.groups, layout, parts.batches.micro_batches)
        TraceFile(Path(folder) / str(number) / f"rank-{rank:05d}.json", place).append(clock.spans(2))


def measure(runs: Sequence[tuple[Layout, int]], unit: float, folder: Path) -> list[tuple[float, float]]:
    """(measured, by formula) of each run."""
    run_ranks(run_traced, runs[0][0].world_size, folder, runs, unit, str(folder))
    found = []
    for number, (layout, micro_batches) in enumerate(runs):
        (bubble,) = measure_bubbles(read_traces(folder / str(number)))
        formula = bubble_ratio(layout.schedule, layout.pp, layout.vpp, micro_batches)
        found.append((bubble.ratio, formula))
    return found


def main() -> int:
    """Print the table; return 1 when a figure is off by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=3.0, help="percentage points")
    parser.add_argument("--unit", type=float, default=UNIT, help="seconds of a forward pass")
    arguments = parser.parse_args()
    runs = [(replace(layout, micro_batch=1), m) for layout in SCHEDULES.values() for m in MICRO_BATCHES]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(runs, arguments.unit, Path(folder))
    missed = False
    sys.stdout.write(f"{'schedule':12} {'m':>3} {'measured':>9} {'formula':>8} {'points off':>10}\n")
    for (layout, micro_batches), (measured, formula) in zip(runs, found, strict=True):
        off = 100 * (measured - formula)
        missed |= abs(off) > arguments.tolerance or formula <= GOOD < measured
        sys.stdout.write(
            f"{layout.schedule:12} {micro_batches:3} {100 * measured:8.1f}% {100 * formula:7.1f}% "
            f"{off:+10.1f}\n"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
