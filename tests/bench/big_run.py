"""Status, list, whole fold and memory on a run of very many events.

python -m tests.bench.big_run [--events 1000000] [--ranks 8] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmtrain.observe.document import status_document
from llmtrain.observe.run_reader import read_view
from llmtrain.run.layout import RunDir
from tests.support.run_folder import abandon, make_run, write_attempt
from tests.support.sample_events import attempt_files

EVENTS_A_STEP_OF_RANK_0 = 3
EVENTS_A_STEP = 2


def make_big_run(folder: Path, events: int, ranks: int) -> RunDir:
    """A run of one failed attempt and a long one, in pieces so that memory stays small."""
    steps = events // (EVENTS_A_STEP * ranks + 1)
    run = make_run(folder / "big-0001", steps=2 * steps)
    write_attempt(run, 1, attempt_files(1, restored=0, steps=500, world_size=ranks, outcome="failed"))
    piece = max(1, min(2000, steps))
    for begin in range(0, steps, piece):
        files = attempt_files(
            2, restored=500 + begin, steps=piece, world_size=ranks, start=1_800_000_300 + begin
        )
        if begin:
            files.pop("supervisor.jsonl")
            files = {name: [e for e in found if e.kind not in FIRST] for name, found in files.items()}
        write_attempt(run, 2, files)
    abandon(run)
    return run


FIRST = ("rank_started", "restored")


def timed_command(*arguments: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak memory (MB) of a command, the quickest of three."""
    found = []
    for _ in range(4):
        begun = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "llmtrain", *arguments], stdout=subprocess.DEVNULL)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        wall, cpu = time.perf_counter() - begun, usage.ru_utime + usage.ru_stime
        found.append((wall, cpu, usage.ru_maxrss / 1000))
    return min(found[1:])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="keep the run here, and use it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "big-0001").exists():
            make_big_run(folder, options.events, options.ranks)
        run = RunDir(folder / "big-0001")
        files = list(run.attempts.glob("*/events/*.jsonl"))
        count = sum(path.read_bytes().count(b"\n") for path in files)
        size = sum(path.stat().st_size for path in files)
        print(f"{count} events of {options.ranks} ranks, {size / 1e6:.0f} MB")
        for arguments in (
            ["status", str(run.path), "--json"],
            ["status", str(run.path)],
            ["status", "--runs", str(folder)],
        ):
            wall, cpu, memory = timed_command(*arguments)
            name = " ".join(arguments[:1] + arguments[2:])
            print(f"{name}: {wall:.3f} s, {cpu:.3f} s of CPU, {memory:.0f} MB")
        begun = time.process_time()
        whole = read_view(run, whole=True)
        seconds = time.process_time() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        print(
            f"whole fold: {seconds:.1f} s of CPU, {1e6 * seconds / count:.1f} us an event, peak {peak:.0f} MB"
        )
        sampled = read_view(run, now=whole.now)
        document, exact = status_document(sampled), status_document(whole)
        for key in ("state", "step", "loss", "restarts", "ranks", "checkpoint"):
            assert document[key] == exact[key], key
        points = len(sampled.state.history.points)
        ratio, true = document["goodput"]["ratio"], exact["goodput"]["ratio"]
        print(f"sampled status equals the whole one; goodput {ratio:.4f} for {true:.4f}, {points} points")


if __name__ == "__main__":
    main()
