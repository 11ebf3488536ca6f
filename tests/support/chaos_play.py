"""One run with faults, from its launch to its end, as a person with patience would see it through; and what
must be true of it then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.checkpoints.arrays import read_tensor
from llmtrain.run.checkpoints.parse import read_manifest
from llmtrain.run.job_file import read_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import chaos, chaos_stand_in, launches
from tests.support import stand_in_runs as runs
from tests.support.chaos import Case, Fault
from tests.support.chaos_ground import SHAPES, Ground

TOLERANCE = 1e-5
"""Of FP32 weights and moments after another layout; in `chaos.STEPS` steps a weight moves by 100 times it."""
PATIENCE = 400.0
"""Seconds that any wait may take, on a machine with too much to do."""
ALL_GONE = 240.0
"""An agent that is cut off waits a minute for a word, and its ranks have two more to save and leave."""
TRIES = 6
BASE = (
    f"train.steps={chaos.STEPS}",
    "precision.mode=fp32",
    "learning_rate.peak=1e-4",  # at 3e-3 the first steps amplify rounding a hundredfold
    "checkpoint.keep=3",
    "faults.restarts_without_progress=6",
    "faults.node_loss_budget=0.67",
)
Weights = dict[str, NDArray[Any]]


@dataclass
class Play:
    """A case on its ground."""

    ground: Ground
    case: Case
    run: RunDir
    struck: list[str] = field(default_factory=list)
    may_end: set[int] = field(default_factory=lambda: {0})
    seconds: float = 0.0

    def play(self) -> None:
        """Launch, strike, go on whenever the run has ended early, until it is done."""
        print(self.case)
        began = time.monotonic()
        self.command = self.launch()
        for fault in self.case.faults:
            self.wait_for(fault)
            self.strike(fault)
            self.go_on_if_ended()
        for _ in range(TRIES):
            self.wait(self.has_ended, "the run to end")
            if self.command.poll() == 0:
                break
            self.go_on_if_ended()
        out, err = self.command.communicate()
        assert self.command.returncode == 0, f"{self.told()}\n{out}\n{err}"
        self.seconds = time.monotonic() - began
        self.ground.mend()
        print(self.told())

    def launch(self) -> subprocess.Popen[str]:
        shape = SHAPES[self.ground.nodes][self.case.shape]
        standby = () if any("standby" in text for text in self.case.overrides) else ("faults.standby=false",)
        threads = "cluster.environment.variables={OMP_NUM_THREADS: 1}"
        ranks = 2 if self.ground.nodes == 1 else 3
        overrides = (*BASE, *shape, *standby, *self.case.overrides, threads)
        injected = chaos.injected(self.case.faults, ranks)
        settings = (*overrides, injected)
        return launches.launch(self.run, *settings, home=self.ground.home, options=self.ground.options)

    def strike(self, fault: Fault) -> None:
        if fault.mends:
            self.ground.mend()
        if fault.kind in chaos.BY_RECIPE:
            self.struck.append(f"{fault.kind} by the recipe")
            return
        ended = self.command.poll() is not None
        what = "" if ended else self.ground.strike(self.run, fault)
        self.struck.append(f"{fault.kind}: {what or 'nothing there'}")
        if what:
            self.may_end |= self.ground.ends_after(fault.kind, what)

    def go_on_if_ended(self) -> None:
        """Resume a run that has ended early: only by a fault that ends runs and struck since its start."""
        status = self.command.poll()
        if status in (None, 0):
            return
        out, err = self.command.communicate()
        assert status in self.may_end, f"exit code {status}: {self.told()}\n{out}\n{err}"
        self.struck.append(f"[{status}, resumed]")
        self.may_end = {0}
        time.sleep(1.0)
        self.ground.mend()
        home = self.ground.home
        self.command = launches.start(self.ground.folder, "resume", str(self.run.path), home=home)

    def wait_for(self, fault: Fault) -> None:
        if fault.after is not None:
            time.sleep(fault.after)
            return

        def is_time() -> bool:
            self.go_on_if_ended()
            return newest_step(self.run) >= fault.step or self.command.poll() == 0

        self.wait(is_time, f"step {fault.step}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"timed out waiting for {what}: {self.told()}"
            self.ground.tick(self.run)
            time.sleep(0.3)

    def has_ended(self) -> bool:
        """Whether the command has; shortly before, nodes come back, so that the run can end what they run."""
        if newest_step(self.run) >= chaos.STEPS - 6:
            self.ground.mend()
        return self.command.poll() is not None

    def told(self) -> str:
        """What happened, for a person."""
        if not self.run.record_json.exists():
            return f"{self.case}\n  no record"
        record = read_record(self.run)
        shapes = [f"{len(each.nodes)}:{each.outcome}:{each.cause}" for each in record.attempts]
        return f"  struck {self.struck}; attempts {shapes}; {record.message}; {self.seconds:.0f} s"

    # ---- what must be true
    def check(self, reference: Weights) -> None:
        """The weights are those of an undisturbed run, every sample was consumed once, nothing is left."""
        runs.assert_nothing_left(self.run, seconds=ALL_GONE)
        if chaos_stand_in.IS_WANTED:
            chaos_stand_in.check_steps(self.run)
            return
        furthest = distance(weights(self.run), reference)
        layouts = layouts_trained(self.run)
        print(f"  {len(layouts)} layouts, furthest {furthest:.1e}")
        assert furthest <= (TOLERANCE if len(layouts) > 1 else 0.0), f"{furthest}: {self.told()}"
        self.check_ledger()

    def check_ledger(self) -> None:
        """Every sample was consumed exactly once, as the corpus has it."""
        audit = ("data", "audit", str(self.run.path), "--compare", "all", "--json")
        out, _ = launches.end(launches.start(self.ground.folder, *audit, home=self.ground.home), 0)
        found = json.loads(out)
        assert found["proven"] and not found["problems"], f"{found}: {self.told()}"
        assert not found["not_compared"], found


class Reference:
    """Weights of runs that nothing happens to, by shape; each is trained once."""

    def __init__(self, ground: Ground) -> None:
        self._ground, self._known = ground, dict[int, Weights]()

    def weights(self, shape: int) -> Weights:
        if shape not in self._known and not chaos_stand_in.IS_WANTED:
            run = RunDir(self._ground.folder / "runs" / f"undisturbed-{shape}")
            try:
                Play(self._ground, Case(-1, "local", shape, ()), run).play()
                self._known[shape] = weights(run)
            finally:
                runs.clean_up(run)
        return self._known.get(shape, {})


def play_and_check(ground: Ground, case: Case, reference: Reference) -> None:
    """A case from its launch to all that must be true of it. What a good run has written is removed."""
    wanted = reference.weights(case.shape)
    play = Play(ground, case, RunDir(ground.folder / "runs" / f"seed-{case.seed}"))
    try:
        play.play()
        play.check(wanted)
        log_line(play, "good")
    except BaseException as error:
        log_line(play, f"{type(error).__name__}: {error}")
        raise
    finally:
        ground.mend()
        runs.clean_up(play.run)
    shutil.rmtree(play.run.path)


def newest_step(run: RunDir) -> int:
    """Highest step that is done."""
    newest = 0
    for path in run.attempts.glob("*/events/*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            if "step_finished" in line:
                try:
                    newest = max(newest, json.loads(line)["data"]["step"])
                except (ValueError, KeyError):
                    continue
    return newest


def weights(run: RunDir) -> Weights:
    """Every tensor of the last step's checkpoint, weights and moments."""
    checkpoint = list_checkpoints(run.checkpoints)[0]
    assert checkpoint.step == chaos.STEPS, checkpoint
    manifest = read_manifest(checkpoint.path)
    return {key: np.array(read_tensor(checkpoint.path, manifest, key)) for key in manifest.tensors}


def distance(found: Weights, reference: Weights) -> float:
    """Largest difference of any two elements; 0.0 only when all their bits are the same."""
    assert found.keys() == reference.keys()
    if all(found[key].tobytes() == reference[key].tobytes() for key in found):
        return 0.0
    apart = max(float(np.abs(found[key].astype(float) - reference[key].astype(float)).max()) for key in found)
    return max(apart, 1e-30)


def layouts_trained(run: RunDir) -> set[str]:
    """Layouts in which steps were taken."""
    trained = {event.attempt for event in runs.events(run, "step_finished")}
    return {str(read_attempt_file(run.attempt(number).attempt_json).layout) for number in trained}


def log_line(play: Play, verdict: str) -> None:
    """For campaigns: one line a case, to the file that LLMTRAIN_CHAOS_LOG names."""
    if path := os.environ.get("LLMTRAIN_CHAOS_LOG"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{play.case}\n{play.told()}\n  {verdict}\n")
