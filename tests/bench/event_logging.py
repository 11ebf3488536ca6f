"""What telling costs a rank: CPU time an event, and its share of a step.

    python -m tests.bench.event_logging [--steps N] [--step-seconds S] [--ranks R]

A rank tells about four events a step: phase, own times, and on rank 0 the step and now and then a
validation. The cost is the CPU time of the whole process, of `emit` and of the thread that writes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from llmtrain.events.schema import PhaseStarted, RankStep, StepFinished
from llmtrain.events.writer import EventWriter

EVENTS_A_STEP = 4


def tell(writer: EventWriter, step: int) -> None:
    """The events of one step of rank 0."""
    writer.emit(PhaseStarted(phase="step", step=step))
    writer.emit(
        StepFinished(
            step=step,
            loss=2.5,
            grad_norm=1.0,
            learning_rate=1e-3,
            seconds=0.5,
            tokens=2048,
            tokens_per_second=4096.0,
            mfu=0.4,
            first_sample=16 * step,
            samples=16,
        )
    )
    writer.emit(RankStep(step=step, seconds=0.5, compute_seconds=0.4, memory_bytes=10**9))
    writer.emit(PhaseStarted(phase="evaluate", step=step))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--step-seconds", type=float, default=0.3, help="of the job that the share is for")
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        writer = EventWriter(Path(folder) / "rank.jsonl", run="bench", attempt=1, source="rank", rank=0)
        cpu, emitting = time.process_time(), 0.0
        for step in range(1, options.steps + 1):
            begun = time.perf_counter()
            tell(writer, step)
            emitting += time.perf_counter() - begun
            writer.flush()
        writer.close()
        cpu = time.process_time() - cpu
        dropped, size = writer.dropped, (Path(folder) / "rank.jsonl").stat().st_size
    events = options.steps * EVENTS_A_STEP
    share = cpu / options.steps * options.ranks / options.step_seconds
    print(f"{events} events, {dropped} dropped, {size / events:.0f} bytes each")
    print(
        f"emit: {1e6 * emitting / events:.1f} us an event; all CPU time: {1e6 * cpu / events:.1f} us an event"
    )
    print(f"{options.ranks} ranks, {options.step_seconds} s a step: {100 * share:.3f} % of one core's time")


if __name__ == "__main__":
    main()
