"""Time from the death of a rank to the first new step: llmtrain with and without ranks in standby, and
`torchrun --max-restarts` beside it, with the same engine, model, layout and checkpoints.

    python -m tests.bench.recovery [--trials 3] [--ranks 8] [--modes standby,cold,torchrun] [--hidden 128]

Trials alternate. torchrun restarts its workers itself; with torch 2.13 and gloo that works only without the
shared store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). Prints seconds from the SIGKILL to the end of each phase,
of the slowest rank, and medians: detect (the failure is known), down (nothing of the attempt runs), start
(new processes run), import and join (torch imported, process group up), load (weights loaded), step (first
new step done).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from llmtrain.events.event import Event
from llmtrain.run.job_file import AttemptFile, read_job_file, write_attempt_file
from llmtrain.run.layout import RunDir
from tests.support import launches
from tests.support import stand_in_runs as runs

LAYOUTS = {8: launches.EIGHT_RANKS, 4: launches.FOUR_RANKS}
PHASES = ("detect", "down", "start", "import+join", "load", "step")
KILL_AFTER_STEP = 20
STANDBY_READY_SECONDS = 300.0


def main() -> None:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8, choices=sorted(LAYOUTS))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--modes", default="standby,cold,torchrun")
    options = parser.parse_args()
    modes = options.modes.split(",")
    folder = Path(tempfile.mkdtemp(prefix="llmtrain-recovery-"))
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    try:
        for trial in range(options.trials):
            for mode in modes:
                row = one_trial(folder / f"{mode}-{trial}", mode, options.ranks, options.hidden)
                rows[mode].append(row)
                print(mode.ljust(10), line(row), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\nmedians    ", "  ".join(phase.rjust(11) for phase in PHASES))
    medians = {
        mode: {phase: statistics.median(row[phase] for row in found) for phase in PHASES if phase in found[0]}
        for mode, found in rows.items()
    }
    for mode, row in medians.items():
        print(mode.ljust(10), line(row))
    if "torchrun" in medians:
        for mode in medians:
            print(f"{mode} / torchrun: {medians[mode]['step'] / medians['torchrun']['step']:.2f}")


def line(row: dict[str, float]) -> str:
    return "  ".join((f"{row[phase]:.2f}" if phase in row else "-").rjust(11) for phase in PHASES)


def one_trial(path: Path, mode: str, ranks: int, hidden: int) -> dict[str, float]:
    run = RunDir(path)
    overrides = (
        *LAYOUTS[ranks],
        f"model.hidden={hidden}",
        "model.layers=4",
        "model.heads=4",
        "model.kv_heads=4",
        "train.steps=100000",
        f"faults.standby={str(mode == 'standby').lower()}",
        "faults.standby_after=1s",
        f"checkpoint.every_steps={KILL_AFTER_STEP - 5}",
    )
    if mode == "torchrun":
        return torchrun_trial(run, overrides, ranks)
    command = launches.launch(run, *overrides, home=path.parent)
    try:
        runs.wait_for(lambda: runs.step_reached(run, KILL_AFTER_STEP), 300, "steps")
        if mode == "standby":
            wait_until_imported(ranks)
        killed_at = kill_a_rank(run, ranks)
        row = phases(run, killed_at, ranks, attempt=2)
        row["detect"] = runs.events(run, "found")[0].time - killed_at
        row["down"] = runs.events(run, "attempt_ended")[0].time - killed_at
        return row
    finally:
        end(run, command)


def end(run: RunDir, command: subprocess.Popen[str]) -> None:
    """End a run that goes on, and all that belongs to it."""
    command.send_signal(signal.SIGINT)
    launches.start(run.path.parent, "stop", str(run.path), "--now", home=run.path.parent).wait(60)
    command.wait(60)
    runs.clean_up(run)


def torchrun_trial(run: RunDir, overrides: tuple[str, ...], ranks: int) -> dict[str, float]:
    """The same engine under torchrun alone."""
    launches.end(
        launches.launch(run, *overrides, home=run.path.parent, options=["--detach"]), 0
    )  # for job.json and the corpus
    runs.wait_for(lambda: run.data_json.exists() and run.attempt_numbers(), 400, "the corpus")
    launches.start(run.path.parent, "stop", str(run.path), "--now", home=run.path.parent).wait(60)
    runs.clean_up(run)
    shutil.rmtree(run.attempts)
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    run.checkpoints.mkdir()
    attempt = run.attempt(1)
    job = read_job_file(run.job_json)
    write_attempt_file(
        attempt.attempt_json,
        AttemptFile(number=1, layout=job.layout, nodes=("here",), restore="newest"),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={run.run_id}.1"),
            *("--max-restarts=3", "-m", "llmtrain.engine", str(run.job_json)),
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        runs.wait_for(lambda: runs.step_reached(run, KILL_AFTER_STEP), 300, "steps")
        return phases(run, kill_a_rank(run, ranks), ranks, attempt=1)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        for process in psutil.process_iter(["cmdline"]):
            if str(run.job_json) in (process.info["cmdline"] or []):
                process.kill()


def wait_until_imported(ranks: int) -> None:
    """Until ranks in standby exist and their CPU time stands still."""
    deadline, before = time.monotonic() + STANDBY_READY_SECONDS, -1.0
    while time.monotonic() < deadline:
        waiting = []
        for process in psutil.process_iter():
            try:
                if "llmtrain.engine" in process.cmdline() and "LLMTRAIN_STANDBY" in process.environ():
                    waiting.append(sum(process.cpu_times()[:2]))
            except psutil.Error:
                continue
        total = sum(waiting)
        if len(waiting) > ranks and total - before < 0.1:
            return
        before = total
        time.sleep(2.0)
    raise AssertionError("no ranks in standby")


def kill_a_rank(run: RunDir, ranks: int) -> float:
    pid = runs.rank_pid(run, ranks - 2)
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed_at


def phases(run: RunDir, killed_at: float, ranks: int, attempt: int) -> dict[str, float]:
    """Seconds from the kill to each phase of the restarted ranks, once a step is done."""

    def after(kind: str, phase: str = "") -> list[Event]:
        return [
            event
            for event in runs.events(run, kind)
            if event.time > killed_at
            and event.attempt == attempt
            and (not phase or event.payload.phase == phase)
        ]

    def restored() -> bool:
        at = [event.time for event in after("restored")]
        return bool(at) and any(event.time > at[-1] for event in after("step_finished"))

    runs.wait_for(restored, 300, "a step after the restart")
    at = after("restored")[-1].time
    return {
        "start": max(event.time for event in after("rank_started")) - killed_at,
        "import+join": max(event.time for event in after("phase_started", "build")) - killed_at,
        "load": at - killed_at,
        "step": min(event.time for event in after("step_finished") if event.time > at) - killed_at,
    }


if __name__ == "__main__":
    main()
