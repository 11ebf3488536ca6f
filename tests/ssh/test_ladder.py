"""The ladder for real: torch ranks on five SSH nodes lose nodes, step down, and train the very same steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain.run.job_file import read_attempt_file
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import ssh_runs
from tests.support import stand_in_runs as runs
from tests.support.beds import SshBed

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = 40
SHORT = (
    f"train.steps={STEPS}",
    "learning_rate.warmup_steps=4",
    "learning_rate.peak=1e-4",  # at 3e-3 the first steps amplify rounding a hundredfold
    "model.layers=2",
    "precision.mode=fp32",
    "data.validation_every=0",
    "checkpoint.every_steps=4",
    "batch.global=20",
    "batch.micro=1",
    "parallel.tp=1",
    "parallel.pp=1",
)
TOLERANCE = 1e-5


def start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmtrain", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def launch(cluster: object, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    settings = [word for each in (*SHORT, *overrides) for word in ("--set", each)]
    return start("launch", "tiny", "--cluster", cluster, "--run-dir", folder, *settings)


def finish(process: subprocess.Popen[str], status: int, seconds: float = 300.0) -> str:
    _, text = process.communicate(timeout=seconds)
    assert process.returncode == status, text[-4000:]
    return text


def losses(run: RunDir) -> dict[int, float]:
    """The loss of every step; of a step that was taken again, that of the newest attempt."""
    found = sorted(runs.events(run, "step_finished"), key=lambda event: event.attempt)
    return {event.payload.step: event.payload.loss for event in found}


def shapes(run: RunDir) -> list[tuple[int, int]]:
    """Nodes and replicas of every attempt, as its ranks read them."""
    files = [read_attempt_file(run.attempt(number).attempt_json) for number in run.attempt_numbers()]
    return [(len(file.nodes), file.layout.dp) for file in files]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that nothing happens to: one rank, one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(launch("local", folder / "run", "parallel.dp=1", f"cluster.storage.path={folder}"), 0)
    found = losses(RunDir(folder / "run"))
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


@pytest.fixture
def five(bed_home: Path, ssh_bed: SshBed, tmp_path: Path) -> Iterator[Callable[[], tuple[RunDir, object]]]:
    """Launches a run with a replica on each of five nodes."""
    run = RunDir(tmp_path / "run")

    def make(*overrides: str) -> tuple[RunDir, subprocess.Popen[str]]:
        profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, nodes=5, per_node=1)
        return run, launch(profile, run.path, "parallel.dp=5", *overrides)

    yield make
    ssh_bed.restore()
    runs.clean_up(run)


def wait_for_step(run: RunDir, step: int, attempt: int) -> None:
    what = f"step {step} of attempt {attempt}"
    runs.wait_for(lambda: runs.step_reached(run, step, attempt), 200.0, what)


def assert_same_training(run: RunDir, undisturbed: dict[int, float]) -> None:
    found = losses(run)
    assert sorted(found) == sorted(undisturbed)
    furthest = max(abs(found[step] - undisturbed[step]) for step in undisturbed)
    assert furthest <= TOLERANCE, furthest
    finish(start("data", "audit", run.path), 0)


def test_a_lost_node_costs_a_rung_and_no_sample(five, ssh_bed, undisturbed) -> None:
    run, launched = five()
    wait_for_step(run, 6, 1)
    ssh_bed.fault("crash", "node4")
    text = finish(launched, 0)
    assert "rung of the ladder for 4 nodes, node4 lost: dp5 -> dp4" in text
    assert shapes(run) == [(5, 5), (4, 4)]
    record = read_record(run)
    assert record.lost_nodes == record.away == ("node4",)
    assert record.attempts[1].nodes == ("node1", "node2", "node3", "node5")
    assert runs.events(run, "restored")[-1].payload.step >= 4
    assert_same_training(run, undisturbed)
    ssh_bed.restore()
    runs.assert_nothing_left(run)


def test_a_lost_node_costs_few_steps_with_copies_in_other_nodes_memory(five, ssh_bed, undisturbed) -> None:
    """The node's own memory is gone with it; the rung for four nodes goes on from what the others hold."""
    run, launched = five("checkpoint.every_steps=1000", "checkpoint.memory.every_steps=4")
    wait_for_step(run, 14, 1)
    ssh_bed.fault("crash", "node4")
    finish(launched, 0)
    assert shapes(run) == [(5, 5), (4, 4)]
    restored = runs.events(run, "restored")[-1].payload
    assert restored.reason == "from the nodes' memory"
    assert 0 <= read_record(run).attempts[0].reached_step - restored.step <= 10
    assert read_attempt_file(run.attempt(2).attempt_json).snapshot == restored.checkpoint
    assert_same_training(run, undisturbed)
    ssh_bed.restore()
    runs.assert_nothing_left(run)


def test_two_nodes_lost_at_once_cost_few_steps_with_two_copies(five, ssh_bed, undisturbed) -> None:
    """The three nodes left hold all of the state, and the rung for three goes on from it."""
    run, launched = five(
        "checkpoint.every_steps=1000",
        "checkpoint.memory.every_steps=4",
        "checkpoint.memory.copies=2",
        "faults.node_loss_budget=0.4",
    )
    wait_for_step(run, 14, 1)
    for node in ("node2", "node3"):  # one keeps a copy of the other's state
        ssh_bed.fault("crash", node)
    finish(launched, 0)
    assert shapes(run)[0] == (5, 5)
    assert shapes(run)[-1] == (3, 3)
    reached = read_record(run).attempts[0].reached_step
    for event in runs.events(run, "restored")[1:]:
        assert event.payload.reason == "from the nodes' memory"
        assert 0 <= reached - event.payload.step <= 10
    assert read_record(run).lost_nodes == ("node2", "node3")
    assert_same_training(run, undisturbed)
    ssh_bed.restore()
    runs.assert_nothing_left(run)


def test_past_the_budget_a_person_decides(five, ssh_bed, undisturbed) -> None:
    run, launched = five()
    wait_for_step(run, 6, 1)
    ssh_bed.fault("crash", "node4")
    wait_for_step(run, 14, 2)
    ssh_bed.fault("crash", "node2")
    text = finish(launched, 93)
    assert "2 of 5 nodes lost (node4, node2), the budget allows 1; newest checkpoint: step" in text
    assert f"llmtrain resume {run.path} --nodes 3" in text
    text = finish(start("resume", run.path), 1)
    assert "3 of 5 nodes are fit to start, 4 are needed" in text
    assert "llmtrain resume RUN --nodes 3" in text
    finish(start("resume", run.path, "--nodes", 3), 0)
    assert shapes(run) == [(5, 5), (4, 4), (3, 3)]
    assert_same_training(run, undisturbed)
    ssh_bed.restore()
    runs.assert_nothing_left(run)
