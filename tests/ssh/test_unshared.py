"""Nodes that do not see this machine's disks: code and files go there, events and logs come back."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support import ssh_runs
from tests.support import stand_in_runs as runs
from tests.support.beds import SshBed
from tests.support.launches import SMALL, STEPS, sets

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

TWO_BY_TWO = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=2", "checkpoint.every_steps=4")

LONG = 150
"""Steps that last long enough for a stop in between."""


class Apart:
    """A folder that is one thing here and another on the nodes."""

    def __init__(self, bed: SshBed, path: Path) -> None:
        self.bed, self.path, self.disk = bed, path, path.with_name(f"{path.name}-of-nodes")
        self._mounted: list[str] = []
        path.mkdir()
        self.disk.mkdir()

    def share(self, *names: str) -> None:
        """One disk for these nodes, mounted where this machine has another one."""
        for name in names:
            self.bed.run(name, "mount", "--bind", str(self.disk), str(self.path))
            self._mounted.append(name)

    def own(self, *names: str) -> None:
        """Each of these nodes has a disk of its own there."""
        for name in names:
            self.bed.run(name, "mount", "-t", "tmpfs", "tmpfs", str(self.path))
            self._mounted.append(name)

    def undo(self) -> None:
        while self._mounted:
            self.bed.run(self._mounted.pop(), "umount", "-l", str(self.path), check=False)


@pytest.fixture
def apart(bed_home: Path, ssh_bed: SshBed, tmp_path: Path) -> Iterator[Apart]:
    made = Apart(ssh_bed, tmp_path / "runs")
    yield made
    for path in made.path.glob("*/job.json"):
        runs.clean_up(RunDir(path.parent))
    made.undo()


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter with all that llmtrain depends on, and without llmtrain."""
    base = Path(sys.executable).resolve()
    subprocess.run([base, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    [site] = (tmp_path / "bare").glob("lib/python3*/site-packages")
    packages = Path(sysconfig.get_paths()["purelib"])
    for entry in packages.iterdir():
        if "llmtrain" not in entry.name:
            (site / entry.name).symlink_to(entry)
    return tmp_path / "bare" / "bin" / "python"


def write_profile(path: Path, bed: SshBed, *, nodes: int, python: Path, push: bool = True) -> Path:
    ssh_runs.write_profile(path, bed, nodes=nodes, python=str(python))
    profile = yaml.safe_load(path.read_text())
    profile["storage"]["shared"] = "nodes"
    profile["backend"]["ssh"]["push"] = push
    path.write_text(yaml.safe_dump(profile))
    return path


def command(*words: object, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == status, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_two_nodes_that_share_a_disk_among_themselves(
    apart: Apart, bare_python: Path, tmp_path: Path
) -> None:
    apart.share("node1", "node2")
    profile = write_profile(tmp_path / "bed.yaml", apart.bed, nodes=2, python=bare_python)
    run, there = RunDir(apart.path / "run"), RunDir(apart.disk / "run")
    settings = sets(*SMALL, *TWO_BY_TWO, f"train.steps={LONG}")
    command("launch", "tiny", "--cluster", profile, "--run-dir", run.path, "--detach", *settings)
    runs.wait_for(lambda: runs.step_reached(run, 6), 240, "step 6")
    command("stop", run.path)
    stopped = read_record(run)
    assert stopped.exit_status == 75 and stopped.committed_step >= 6

    # It goes on from a checkpoint that only the nodes see.
    command("resume", run.path)
    assert (read_record(run).exit_status, read_record(run).reached_step) == (0, LONG)
    assert runs.events(run, "restored")[-1].payload.step == stopped.committed_step
    steps = [event.payload.step for event in runs.events(run, "step_finished")]
    assert steps == list(range(1, LONG + 1)), "every event has come back"
    hosts = {event.rank: event.payload.host for event in runs.events(run, "rank_started")}
    assert hosts == {0: "node1", 1: "node1", 2: "node2", 3: "node2"}
    for name in ("rank-00000.log", "rank-00003.log", "node-000.log", "node-001.log"):
        assert (run.attempt(2).logs / name).read_bytes() == (there.attempt(2).logs / name).read_bytes()
    newest = sorted(path.name for path in there.checkpoints.glob("step-*"))[-1]
    assert newest == f"step-{LONG:08d}" and not list(run.checkpoints.glob("step-*"))
    assert not there.record_json.exists(), "the supervisor's own files stay with it"
    code = sorted((apart.disk / ".code").iterdir())[0]
    assert (code / "llmtrain" / "_data" / "templates" / "node.sh.j2").exists()
    assert "finished" in command("status", run.path)
    runs.assert_nothing_left(run, 30.0)


def test_nodes_that_share_nothing_are_refused_but_for_one_alone(
    apart: Apart, bare_python: Path, tmp_path: Path
) -> None:
    apart.own("node1", "node2")
    profile = write_profile(tmp_path / "bed.yaml", apart.bed, nodes=2, python=bare_python)
    run = RunDir(apart.path / "run")
    launch = ("launch", "tiny", "--cluster", profile, "--run-dir", run.path, *sets(*SMALL, *TWO_BY_TWO))
    [xxhash] = bare_python.parents[1].glob("lib/python3*/site-packages/xxhash")
    lent = xxhash.readlink()
    xxhash.unlink()
    text = command(*launch, status=1)
    assert "has no xxhash" in text and f"`{bare_python} -m pip install xxhash` on node2" in text
    xxhash.symlink_to(lent)
    assert f"node2: {apart.path} is not the same folder there as on the first node" in text
    assert "checkpoints need a folder that all nodes share (storage.path), or a run of one node" in text
    assert not run.path.exists()

    without = write_profile(tmp_path / "no-push.yaml", apart.bed, nodes=1, python=bare_python, push=False)
    alone = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1")
    text = command(
        "launch", "tiny", "--cluster", without, "--run-dir", run.path, *sets(*SMALL, *alone), status=1
    )
    assert "has no llmtrain (ModuleNotFoundError" in text and "backend.ssh.push" in text

    one = write_profile(tmp_path / "one.yaml", apart.bed, nodes=1, python=bare_python)
    command("launch", "tiny", "--cluster", one, "--run-dir", run.path, *sets(*SMALL, *alone))
    assert read_record(run).reached_step == STEPS
    listed = apart.bed.run("node1", "ls", str(run.checkpoints))
    assert f"step-{STEPS:08d}" in listed


def test_without_the_word_the_hint_names_it(apart: Apart, tmp_path: Path) -> None:
    apart.share("node1", "node2")
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", apart.bed, nodes=2)
    text = command("launch", "tiny", "--cluster", profile, *sets(*SMALL, *TWO_BY_TWO), status=1)
    assert "is not the same folder there as here" in text and "storage.shared: nodes" in text
