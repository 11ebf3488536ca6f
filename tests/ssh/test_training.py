"""The main job for real: torch ranks on four SSH nodes take the very steps that they take on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.agent.sweep import leftovers
from llmtrain.run.layout import RunDir
from tests.support import ssh_runs
from tests.support import stand_in_runs as runs

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

STEPS = 4
SHORT = [
    f"train.steps={STEPS}",
    "learning_rate.warmup_steps=1",
    "model.layers=4",
    "data.validation_every=0",
    "checkpoint.every_steps=2",
]


def launch(cluster: str, folder: Path, *overrides: str) -> RunDir:
    command = [sys.executable, "-m", "llmtrain", "launch", "tiny", "--cluster", cluster, "--run-dir", folder]
    settings = [word for each in [*SHORT, *overrides] for word in ("--set", each)]
    done = subprocess.run(
        [*command, *settings],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return RunDir(folder)


def losses(run: RunDir) -> list[tuple[int, float, float]]:
    return [
        (event.payload.step, event.payload.loss, event.payload.grad_norm)
        for event in runs.events(run, "step_finished")
    ]


@pytest.mark.timeout(900)
def test_four_nodes_take_the_same_steps_as_one_machine(bed_home, ssh_bed, tmp_path) -> None:
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed)
    here = launch("local", tmp_path / "local", f"cluster.storage.path={tmp_path}/runs")
    there = launch(str(profile), tmp_path / "ssh")
    assert [step for step, _, _ in losses(here)] == [1, 2, 3, 4]
    assert losses(there) == losses(here)
    hosts = {event.rank: event.payload.host for event in runs.events(there, "rank_started")}
    assert hosts == {rank: f"node{1 + rank // 2}" for rank in range(8)}
    assert not leftovers(there.path)
    names = {path.relative_to(there.path) for path in there.path.rglob("*") if path.is_file()}
    assert Path("attempts/1/logs/rank-00007.log") in names
    assert Path(f"checkpoints/step-{STEPS:08d}/manifest.json") in names
