"""What the death of a rank costs with the tier in host memory, beside checkpoints alone: the same run, which
writes the same checkpoints, with and without snapshots in shared memory between them.

    python -m tests.bench.memory_recovery [--trials 3] [--hidden 640] [--layers 8] [--warm]

Trials alternate. A rank is killed with SIGKILL; the next attempt's ranks wait in standby. As on a cluster,
where checkpoints lie on storage that all nodes share, what the machine's page cache holds of them is dropped
before the kill; `--warm` keeps it. Prints seconds from the SIGKILL until the state is restored, until the
first new step is done and until the run is where it was, seconds of reading alone, steps lost, and medians.
Exits with 1 when a snapshot lost more than ten steps, or was not faster than the disk by the last two.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from llmtrain.events.event import Event
from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.job_file import read_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.snapshots import drop, snapshots_of
from tests.bench.recovery import end, kill_a_rank, wait_until_imported
from tests.support import launches
from tests.support import stand_in_runs as runs

RANKS = 4
CHECKPOINT_EVERY, SNAPSHOT_EVERY = 25, 5
KILL_AFTER_STEP = 2 * CHECKPOINT_EVERY - 3
"""So that both lose something, the disk nearly as much as it can."""
MOST_LOST = 10
MODES = ("memory", "disk")
FIGURES = ("read", "restored", "first step", "caught up", "lost steps")


def main() -> None:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    settings = (f"model.hidden={options.hidden}", f"model.layers={options.layers}")
    folder = Path(tempfile.mkdtemp(prefix="llmtrain-memory-recovery-"))
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    print("        ", "  ".join(figure.rjust(10) for figure in FIGURES))
    try:
        for trial in range(options.trials):
            for mode in MODES:
                row = one_trial(RunDir(folder / f"{mode}-{trial}"), mode, settings, options.warm)
                rows[mode].append(row)
                print(mode.ljust(8), line(row), flush=True)
                shutil.rmtree(folder / f"{mode}-{trial}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(report(rows))


def report(rows: dict[str, list[dict[str, float]]]) -> int:
    """Print medians and ratios; the exit code."""
    medians = {
        mode: {figure: statistics.median(row[figure] for row in found) for figure in FIGURES}
        for mode, found in rows.items()
    }
    print("medians")
    for mode, row in medians.items():
        print(mode.ljust(8), line(row))
    ratios = {
        figure: statistics.median(
            memory[figure] / disk[figure] for memory, disk in zip(rows["memory"], rows["disk"], strict=True)
        )
        for figure in FIGURES
    }
    print("memory / disk, median of the trials' ratios")
    print("".ljust(8), line(ratios))
    lost = max(row["lost steps"] for row in rows["memory"])
    return 1 if lost > MOST_LOST or max(ratios["restored"], ratios["caught up"]) >= 1 else 0


def line(row: dict[str, float]) -> str:
    return "  ".join(f"{row[figure]:.2f}".rjust(10) for figure in FIGURES)


def one_trial(run: RunDir, mode: str, settings: tuple[str, ...], is_warm: bool) -> dict[str, float]:
    """Launch, kill a rank, and measure until the run is where it was."""
    overrides = [
        *launches.FOUR_RANKS,
        *settings,
        "model.heads=4",
        "model.kv_heads=4",
        "batch.global=4",
        "model.sequence=16",  # little to compute, so that a large state fits into short trials
        "train.steps=100000",
        "learning_rate.peak=1e-4",
        "faults.standby_after=1s",
        f"checkpoint.every_steps={CHECKPOINT_EVERY}",
    ]
    if mode == "memory":
        overrides.append(f"checkpoint.memory.every_steps={SNAPSHOT_EVERY}")
    command = launches.launch(run, *overrides, home=run.path.parent)
    try:
        runs.wait_for(lambda: runs.step_reached(run, CHECKPOINT_EVERY + 1), 900, "the checkpoint")
        wait_until_imported(RANKS)
        runs.wait_for(lambda: runs.step_reached(run, KILL_AFTER_STEP), 900, "steps")
        if not is_warm:
            forget(run)
        return measured(run, kill_a_rank(run, RANKS))
    finally:
        end(run, command)
        for number in run.attempt_numbers():
            for node in read_attempt_file(run.attempt(number).attempt_json).nodes:
                drop(snapshots_of(run.path, node))


def forget(run: RunDir) -> None:
    """Drop the checkpoints from the page cache."""
    for checkpoint in list_checkpoints(run.checkpoints):
        for path in checkpoint.path.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measured(run: RunDir, killed_at: float) -> dict[str, float]:
    """Seconds from the kill, and steps lost."""

    def after(kind: str) -> list[Event]:
        return [event for event in runs.events(run, kind) if event.attempt == 2]

    reached = max(event.payload.step for event in runs.events(run, "step_finished") if event.attempt == 1)
    runs.wait_for(lambda: runs.step_reached(run, reached, 2), 900, "the step that was reached")
    [restored] = after("restored")
    reading = max(event.time for event in after("phase_started") if event.payload.phase == "load")
    steps = {event.payload.step: event.time for event in after("step_finished")}
    return {
        "read": restored.time - reading,
        "restored": restored.time - killed_at,
        "first step": min(steps.values()) - killed_at,
        "caught up": steps[reached] - killed_at,
        "lost steps": float(reached - restored.payload.step),
    }


if __name__ == "__main__":
    main()
