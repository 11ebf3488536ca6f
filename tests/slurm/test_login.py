"""Launches from outside of the cluster: SLURM's commands and the run's folder are on a login node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrain.run.layout import RunDir
from tests.slurm.conftest import PROFILE
from tests.support.launches import SMALL, sets
from tests.support.slurm_beds import SlurmBed
from tests.support.stand_in_runs import step_reached, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

Laptop = Callable[..., tuple[str, str]]


@pytest.fixture
def profile(shared: Path) -> Path:
    path = shared / "bed.yaml"
    text = PROFILE.format(storage=shared / "cluster" / "runs").replace("kind: slurm,", "kind: slurm, PYTHON,")
    text = text.replace("PYTHON", f"python: {sys.executable}").replace("slurm: {", "slurm: {login: node1, ")
    path.write_text(text)
    return path


@pytest.fixture
def laptop(
    slurm_bed: SlurmBed, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Laptop]:
    """Commands as typed on a machine that reaches node1 over SSH and has no SLURM."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "config").write_text(slurm_bed.ssh_config.read_text())
    (tmp_path / "bin").mkdir()
    monkeypatch.delenv("SLURM_CONF")
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": str(tmp_path / "bin")}
    environment.pop("SSH_AUTH_SOCK", None)

    def run(*words: object, status: int = 0) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "llmtrain", *map(str, words)],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == status, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    yield run


def test_a_run_from_a_laptop(laptop: Laptop, profile: Path, shared: Path, tmp_path: Path) -> None:
    layout = ("parallel.dp=4", "parallel.tp=1", "parallel.pp=2", "train.steps=2000")
    arguments = ("launch", "tiny", "--cluster", profile, *sets(*SMALL, *layout))
    out, _ = laptop(*arguments, "--json")
    launched = json.loads(out)
    here, there = (
        RunDir(tmp_path / "runs" / launched["run"]),
        RunDir(shared / "cluster" / "runs" / launched["run"]),
    )
    for name in ("job.json", "plan.json", "submission.json", "scripts/node.sh", "scripts/slurm.sh"):
        assert (here.path / name).read_bytes() == (there.path / name).read_bytes()
    assert str(there.path) in (there.scripts / "slurm.sh").read_text()
    assert not (there.path / "remote.json").exists()

    wait_for(lambda: step_reached(there, 5), 180, "step 5")
    shown = json.loads(laptop("status", launched["run"], "--json")[0])
    assert (shown["run"], shown["state"]) == (launched["run"], "running") and shown["step"] >= 5
    assert shown["job"]["state"] == "running"
    _, talk = laptop("status", launched["run"], "--watch", status=2)
    assert f"ssh -t node1 {sys.executable} -m llmtrain status {there.path} --watch" in talk
    _, talk = laptop("stop", here.path)
    assert "stopped as asked; newest checkpoint: step" in talk
    saved = json.loads(laptop("status", here.path, "--json")[0])["step"]
    laptop("logs", launched["run"], "--rank", "0")
    _, talk = laptop("resume", launched["run"])
    assert "goes on by itself (slurm://" in talk
    wait_for(lambda: step_reached(there, saved + 2, 2), 180, "steps of the next attempt")
    laptop("stop", here.path, "--now")
    assert not here.attempts.exists(), "all that happens, happens there"


def test_what_is_wrong_there_is_told_here(laptop: Laptop, profile: Path, tmp_path: Path) -> None:
    def launch(status: int, *overrides: str) -> str:
        return laptop("launch", "tiny", "--cluster", profile, *sets(*overrides), status=status)[1]

    assert "there is no partition `nope`" in launch(2, "cluster.backend.slurm.partition=nope")
    text = launch(2, "cluster.backend.python=/usr/bin/env")
    assert "/usr/bin/env on node1 has no llmtrain" in text
    assert "nowhere" in launch(1, "cluster.backend.slurm.login=nowhere")
    assert "cannot be made on node1" in launch(2, "cluster.storage.path=/proc/runs")
    assert "name one login node" in launch(2, "'cluster.backend.slurm.login=node[1-2]'".strip("'"))
    assert "needs the interpreter there" in launch(2, "cluster.backend.python=''")
    assert not (tmp_path / "runs").exists(), "what was refused leaves nothing"
