"""People, schedulers and administrators at any moment of a job's life: drawn from seeds, on a real cluster.

Whatever they do, a run that was told to stop stands still until somebody resumes it, and any other goes
on by itself; in the end it has done all its steps. `LLMTRAIN_MOMENTS=40 pytest tests/slurm/test_moments.py`
plays so many seeds instead of a few, `LLMTRAIN_MOMENTS_SEED=7` that one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder
from llmtrain.run.record import read_record
from tests.support import shadow_torch
from tests.support.launches import sets
from tests.support.slurm_beds import SlurmBed
from tests.support.stand_in_runs import events, step_reached, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 14
BEHAVIOUR = {"steps": STEPS, "step_seconds": 0.15, "checkpoint_every": 3, "unannounced": True}
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
GONE_SECONDS = 2.0
"""After which a job that was ended has not come back."""
LIMIT_SECONDS = 240.0

MOMENTS: dict[str, Callable[[Stage], bool]] = {
    "submitted": lambda stage: True,
    "started": lambda stage: stage.state() != "PENDING",
    "supervised": lambda stage: read_holder(stage.run) is not None,
    "attempt": lambda stage: bool(stage.run.attempt_numbers()),
    "ranks": lambda stage: bool(events(stage.run, "rank_started")),
    "training": lambda stage: step_reached(stage.run, 2),
    "saving": lambda stage: (stage.run.path / "saved").exists(),
    "last step": lambda stage: step_reached(stage.run, STEPS),
    "ended": lambda stage: read_record(stage.run).stage == "ended",
}
STOPS = ("stop", "stop --now", "interrupt", "scancel")
OTHERS = ("warn", "requeue", "requeue held", "hold", "suspend", "resume")


@dataclass(frozen=True)
class Play:
    """What is done, and when."""

    moment: str
    commands: tuple[tuple[str, float], ...]
    """Commands, each after a pause in seconds."""


def draw(seed: int) -> Play:
    """The first command is one of the stops every other time; a second and third one follow closely."""
    chance = random.Random(seed)
    first = chance.choice(STOPS if seed % 2 else OTHERS)
    later = [chance.choice(STOPS + OTHERS) for _ in range(chance.choice((0, 1, 1, 2)))]
    commands = tuple((command, chance.choice((0.0, 0.1, 0.4, 1.0, 2.5))) for command in (first, *later))
    return Play(moment=chance.choice(list(MOMENTS)), commands=commands)


def seeds() -> list[int]:
    if one := os.environ.get("LLMTRAIN_MOMENTS_SEED"):
        return [int(one)]
    return list(range(int(os.environ.get("LLMTRAIN_MOMENTS", "2"))))


class Stage:
    """One run on the cluster, and those who interfere with it."""

    def __init__(self, bed: SlurmBed, run: RunDir, launch: list[str]) -> None:
        self.bed, self.run, self.said = bed, run, list[str]()
        self.launch = self.start(*launch)
        self.is_stopped = False
        wait_for(lambda: run.submission_json.exists() or self.launch.poll() is not None, 60, "a job")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        log = (self.run.path.parent / "said").open("a")
        return subprocess.Popen(
            [sys.executable, "-m", "llmtrain", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def type(self, *arguments: str) -> int:
        """Exit code of a command that a person types."""
        return self.start(*arguments, str(self.run.path)).wait(200)

    @property
    def job(self) -> str:
        return str(json.loads(self.run.submission_json.read_text())["jobs"][0])

    def state(self) -> str:
        return self.bed.state(self.job)

    def is_done(self) -> bool:
        record = read_record(self.run)
        return record.stage == "ended" and record.exit_status == 0

    def scontrol(self, *words: str) -> None:
        self.bed.slurm("scontrol", *words, check=False)

    def do(self, command: str) -> None:
        """One command; what is refused in this state of the job is no fault."""
        if command in ("stop", "stop --now"):
            self.scontrol("resume", self.job)
            assert self.type(*command.split()) == 0
        elif command == "interrupt":
            self.launch.send_signal(signal.SIGINT)
            assert self.launch.wait(200) in (0, 75)
        elif command == "scancel":
            self.bed.slurm("scancel", self.job, check=False)
            wait_for(lambda: self.state() not in (*ALIVE, "COMPLETING"), 60, "the job to be cancelled")
        elif command == "resume":
            assert self.type("resume", "--detach") in (0, 2)  # 2: a job is there, or a supervisor
        elif command == "warn":
            if self.state() == "RUNNING":  # scancel tries for minutes to signal one that is just leaving.
                with suppress(subprocess.TimeoutExpired):
                    self.bed.slurm("scancel", "--batch", "--signal=USR1", self.job, check=False)
        elif command == "requeue held":
            self.scontrol("requeuehold", self.job)
        elif command == "requeue":
            self.scontrol("requeue", self.job)
        else:
            back = {"hold": "release", "suspend": "resume"}[command]
            self.scontrol(command, self.job)
            time.sleep(1.5)
            self.scontrol(back, self.job)

    def assert_gone(self) -> None:
        """No job, and no process on any node; and it stays so."""
        if self.is_done():  # Its job takes a moment more, and there is nothing to be stopped.
            wait_for(lambda: self.state() not in ALIVE, 30, "the job to end")
        assert self.state() not in ALIVE, self.state()
        time.sleep(GONE_SECONDS)
        assert self.state() not in ALIVE, f"the job came back: {self.state()}"
        wait_for(lambda: not self.processes(), 30, f"processes to vanish: {self.processes()}")

    def processes(self) -> list[str]:
        return [line for name in self.bed.names for line in self.bed.processes(name, str(self.run.path))]

    def finish(self) -> None:
        """Let a run that may go on do so, and resume one that stands still, until it is done."""
        deadline, resumed = time.monotonic() + LIMIT_SECONDS, 0
        while not self.is_done():
            assert time.monotonic() < deadline, f"{self.state()}: {read_record(self.run)}"
            state = self.state()
            if state in ("REQUEUE_HOLD", "SPECIAL_EXIT"):
                self.scontrol("release", self.job)
            if state == "SUSPENDED":
                self.scontrol("resume", self.job)
            if state == "PENDING":
                self.scontrol("release", self.job)
                self.bed.start_now(self.job)
            elif state not in (*ALIVE, "COMPLETING") and not self.is_done():
                assert self.type("resume", "--detach") == 0
                assert (resumed := resumed + 1) <= 3, read_record(self.run)
            time.sleep(0.3)


@pytest.fixture
def launch(profile: Path, shared: Path, corpus: Path) -> list[str]:
    """A launch whose torchrun is the stand-in's."""
    shadow = shadow_torch.install(shared / "shadow", **BEHAVIOUR)
    values = sets(*shadow_torch.overrides(shadow, corpus))
    return ["launch", "tiny", "--cluster", str(profile), *values]


@pytest.mark.parametrize("seed", seeds())
def test_whatever_happens_when(seed: int, launch: list[str], slurm_bed: SlurmBed, shared: Path) -> None:
    play = draw(seed)
    run = RunDir(shared / "runs" / "run")
    run.path.parent.mkdir(exist_ok=True)
    stage = Stage(slurm_bed, run, [*launch, "--run-dir", str(run.path)])
    try:
        wait_for(lambda: MOMENTS[play.moment](stage) or stage.launch.poll() is not None, 120, play.moment)
        for command, pause in play.commands:
            time.sleep(pause)
            stage.do(command)
            if command in STOPS:
                stage.assert_gone()
        stage.finish()
        steps = [event.payload.step for event in events(run, "step_finished")]
        assert sorted(set(steps)) == list(range(1, STEPS + 1))
        assert stage.launch.wait(60) in (0, 75)
        wait_for(lambda: not stage.processes(), 30, "processes to vanish")
    except BaseException:
        print(f"seed {seed}: {play}\n{(shared / 'runs' / 'said').read_text()}")
        print(run.supervisor_log.read_text() if run.supervisor_log.exists() else "no supervisor")
        raise
    finally:
        if stage.launch.poll() is None:
            stage.launch.kill()
