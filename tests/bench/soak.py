"""False alarms: a training whose saves, evaluations, steps and batches are all as uneven as they get, watched
by the real supervisor for as long as you like.

    python -m tests.bench.soak [--minutes 30] [--ranks 4] [--keep FOLDER]

Nothing fails in it, so whatever the supervisor finds, names or restarts is a false alarm. The disk is slow in
a rhythm (saves take from nothing to a minute and a half, some of them on one rank only), the batch grows one
sequence at a time over the first third, so that replicas have different numbers of micro-batches, evaluations
come every few steps, and once in a while all ranks take twenty times as long for some steps. Load the machine
besides to make it harder. Prints a table a minute and the account at the end; exit code 1 on any alarm.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from llmtrain.events.event import Event
from llmtrain.run.layout import RunDir
from tests.support import launches
from tests.support import stand_in_runs as runs

LAYOUTS = {2: ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1"), 4: launches.FOUR_RANKS}
STEP_SECONDS = 0.1
"""That every rank sleeps in each step, so that the machine is left for others and steps count, not cores."""
CYCLE = 1200
"""Steps after which the disk's moods come again."""
SLOW_STEP_SECONDS = 2.0
DISK: tuple[tuple[int, int, float, bool], ...] = (
    (200, 150, 3.0, True),
    (400, 150, 20.0, False),
    (600, 100, 90.0, True),
    (800, 150, 45.0, False),
)
"""(first step of a cycle, steps, seconds that each save takes longer, on all ranks rather than on rank 1)."""
ALARMS = ("found", "slow_rank", "attempt_ended", "checkpoint_failed", "rank_failed")
TOLD_SECONDS = 60.0


def main() -> int:
    """Run, watch, stop, and say what was alarmed; 1 when anything was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4, choices=sorted(LAYOUTS))
    parser.add_argument("--keep", type=Path, help="run folder that stays; default: a temporary one")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="llmtrain-soak-"))
    run = RunDir(folder / "run")
    try:
        return soak(run, 60.0 * options.minutes, options.ranks)
    finally:
        runs.clean_up(run)
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def soak(run: RunDir, seconds: float, ranks: int) -> int:
    """One soak; the number of seconds counts from the first step."""
    command = launches.launch(run, *overrides(seconds, ranks), home=run.path.parent, options=["--detach"])
    launches.end(command, 0)
    runs.wait_for(lambda: runs.step_reached(run, 1), 600, "the first step")
    began, told = time.monotonic(), 0.0
    while time.monotonic() - began < seconds and not alarms(run):
        if time.monotonic() - told >= TOLD_SECONDS:
            told = time.monotonic()
            say(f"{(told - began) / 60:5.1f} min  {account(run)}")
        time.sleep(15.0)
    watched = time.monotonic() - began
    found = alarms(run)
    stop = launches.start(run.path.parent, "stop", str(run.path), home=run.path.parent)
    stop.wait(300)
    say(f"\nwatched {watched / 60:.1f} minutes: {account(run)}")
    for event in found:
        say(f"ALARM attempt {event.attempt}: {event.payload}")
    say(f"{len(found)} false alarms")
    return int(bool(found))


def overrides(seconds: float, ranks: int) -> tuple[str, ...]:
    """The recipe of a soak."""
    ramp_steps = int(seconds / 3 / (2 * STEP_SECONDS))
    return (
        *LAYOUTS[ranks],
        "train.steps=1000000",
        "batch.global=12",
        f"batch.ramp={{start: 2, increment: 1, steps: {max(ramp_steps, 10)}}}",
        "data.validation_every=70",
        "data.validation_sequences=256",
        "checkpoint.every_steps=50",
        "checkpoint.every=20s",
        "faults.standby_after=60s",
        f"faults.inject=[{', '.join(_faults(seconds, ranks))}]",
    )


def _faults(seconds: float, ranks: int) -> Iterator[str]:
    """Entries of `faults.inject`: all ranks alike but for the disk, whose moods are not the ranks' fault."""
    last = int(seconds / STEP_SECONDS)
    for rank in range(ranks):
        yield _fault("slow", 1, 1_000_000, rank, STEP_SECONDS)
        for start in range(0, last, CYCLE):
            yield _fault("slow", start + 1000, 4, rank, SLOW_STEP_SECONDS)
            for first, steps, delay, on_all in DISK:
                if on_all or rank == 1:
                    yield _fault("slow_disk", start + first, steps, rank, delay)


def _fault(kind: str, step: int, steps: int, rank: int, seconds: float) -> str:
    return f"{{kind: {kind}, step: {step}, steps: {steps}, rank: {rank}, seconds: {seconds}}}"


def alarms(run: RunDir) -> list[Event]:
    """What the supervisor took for a failure, or for a slow rank, of a run that has neither."""
    return [event for event in runs.events(run) if event.kind in ALARMS]


def account(run: RunDir) -> str:
    """What the run has been through so far."""
    events = runs.events(run)
    count = Counter(event.kind for event in events)
    saved = [event.payload.seconds for event in events if event.kind == "checkpoint_committed"]
    steps = [event.payload for event in events if event.kind == "step_finished"]
    evaluated = [event.payload.seconds for event in events if event.kind == "evaluated"]
    batches = {step.samples for step in steps}
    return (
        f"step {steps[-1].step if steps else 0}, slowest {max((s.seconds for s in steps), default=0):.1f} s, "
        f"batch {min(batches, default=0)} to {max(batches, default=0)}; "
        f"{len(saved)} checkpoints, slowest {max(saved, default=0.0):.0f} s, "
        f"{count['checkpoint_skipped']} left out; "
        f"{len(evaluated)} evaluations, slowest {max(evaluated, default=0.0):.1f} s; "
        f"{count['rank_step']} times of ranks compared"
    )


def say(text: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
