"""Random faults, several in one run: it ends with the very weights of an undisturbed one, every sample is
proven to be consumed exactly once, and nothing is left running.

`LLMTRAIN_CHAOS_SEEDS=200` runs so many seeds; without it, a few.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import chaos, launches
from tests.support import stand_in_runs as runs

pytestmark = pytest.mark.e2e

SEEDS = int(os.environ.get("LLMTRAIN_CHAOS_SEEDS", "4"))
TWO_RANKS = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1")
OVERRIDES = (
    *TWO_RANKS,
    f"train.steps={chaos.STEPS}",
    "checkpoint.keep=3",
    "faults.restarts_without_progress=6",
    "faults.standby=false",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One storage folder for all, so that they share the corpus."""
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, str]:
    run = RunDir(folder / "undisturbed")
    launches.end(launches.launch(run, *OVERRIDES, home=folder), 0)
    return launches.weights(run)


@pytest.fixture
def run(folder: Path, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    run = RunDir(folder / f"seed-{request.node.callspec.params['seed']}")
    yield run
    runs.clean_up(run)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_chaos(seed: int, run: RunDir, folder: Path, undisturbed: dict[str, str]) -> None:
    faults = chaos.draw(seed, ranks=2)
    command = launches.launch(run, *OVERRIDES, chaos.injected(faults), home=folder)
    for fault in faults:
        wait_for_step(run, fault.step, command)
        if command.poll() is None and fault.kind not in chaos.BY_RECIPE and chaos.strike(run, fault):
            command.communicate(timeout=240)
            command = go_on(run, folder, command)
    out, err = command.communicate(timeout=240)
    for _ in range(2):  # A preemption that came while the run ended leaves it resumable.
        if command.returncode == 75:
            command = launches.start(folder, "resume", str(run.path), home=folder)
            out, err = command.communicate(timeout=240)
    assert command.returncode == 0, f"{faults}\n{out}\n{err}\n{read_record(run).message}"
    assert launches.weights(run) == undisturbed, f"{faults}"
    check_ledger(run, folder)
    runs.assert_nothing_left(run)


def wait_for_step(run: RunDir, step: int, command: subprocess.Popen[str]) -> None:
    """Until a step is done, or the run has ended."""
    runs.wait_for(lambda: runs.step_reached(run, step) or command.poll() is not None, 240, f"step {step}")


def go_on(run: RunDir, folder: Path, ended: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Resume a run whose supervisor has left, unless it was done before."""
    if ended.returncode == 0:
        return ended
    return launches.start(folder, "resume", str(run.path), home=folder)


def check_ledger(run: RunDir, folder: Path) -> None:
    """Every sample was consumed exactly once, as the corpus has it."""
    audit = ("data", "audit", str(run.path), "--compare", "all", "--json")
    out, _ = launches.end(launches.start(folder, *audit, home=folder), 0)
    told = json.loads(out)
    assert told["proven"] and not told["problems"], told
    assert not told["not_compared"], told


def test_faults_are_drawn_from_the_seed() -> None:
    for seed in range(200):
        faults = chaos.draw(seed, ranks=2)
        assert faults == chaos.draw(seed, ranks=2)
        assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
        assert all(0 < fault.step < chaos.STEPS for fault in faults)
    assert {fault.kind for seed in range(40) for fault in chaos.draw(seed, ranks=2)} == set(chaos.KINDS)
