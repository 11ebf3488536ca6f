"""Steps as a transport: the exact commands, containers, and real steps on real nodes of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.backends.base import Node
from llmtrain.backends.slurm.backend import SlurmBackend
from llmtrain.backends.slurm.calls import SlurmCalls
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.load import load_profile
from llmtrain.transport.base import TransportError
from llmtrain.transport.srun import SrunTransport, StepSettings
from tests.slurm.conftest import PROFILE
from tests.support.slurm_answers import Answers
from tests.support.slurm_beds import SlurmBed

ALWAYS = [
    "srun",
    "--quiet",
    "--jobid=7",
    "--nodelist=node2",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--overlap",
    "--cpu-bind=none",
    "--kill-on-bad-exit=0",
    "--export=ALL",
]


def profile(tmp_path: Path, *overrides: str) -> ClusterProfile:
    return load_profile("a100-32x8", list(overrides))


def command(cluster: ClusterProfile, task_plugin: str = "task/affinity,task/cgroup") -> list[str]:
    calls = SlurmCalls(Answers(f"TaskPlugin              = {task_plugin}\n"), 5.0)  # type: ignore[arg-type]
    environment = {"SLURM_JOB_ID": "7", "LLMTRAIN_RUNS": "/shared/runs"}
    backend = SlurmBackend(cluster, calls=calls, environment=environment)
    transport = backend.transport(Node(name="node2", address=""))
    assert isinstance(transport, SrunTransport)
    return transport.command(["python", "-m", "llmtrain.agent"])


def test_a_step_says_all_that_it_needs(tmp_path: Path) -> None:
    assert command(profile(tmp_path)) == [*ALWAYS, "python", "-m", "llmtrain.agent"]


def test_a_slurm_that_binds_nothing_is_not_told_to(tmp_path: Path) -> None:
    assert "--cpu-bind=none" not in command(profile(tmp_path), "task/none")


def test_pyxis(tmp_path: Path) -> None:
    mounts = '["/data:/data:ro"]'
    container = (
        f"{{kind: pyxis, image: /img/train.sqsh, mounts: {mounts}, arguments: [--container-remap-root]}}"
    )
    cluster = profile(
        tmp_path, f"backend.slurm.container={container}", "backend.slurm.srun_args=[--mpi=none]"
    )
    assert command(cluster)[len(ALWAYS) :] == [
        "--mpi=none",
        "--container-image=/img/train.sqsh",
        "--container-mounts=/shared/runs:/shared/runs,/data:/data:ro",
        "--no-container-mount-home",
        "--container-remap-root",
        "python",
        "-m",
        "llmtrain.agent",
    ]


def test_apptainer(tmp_path: Path) -> None:
    container = '{kind: apptainer, image: /img/train.sif, mounts: ["/data:/data"], mount_home: true}'
    assert command(profile(tmp_path, f"backend.slurm.container={container}"))[len(ALWAYS) :] == [
        "apptainer",
        "exec",
        "--nv",
        "--bind",
        "/shared/runs:/shared/runs",
        "--bind",
        "/data:/data",
        "/img/train.sif",
        "python",
        "-m",
        "llmtrain.agent",
    ]


@pytest.fixture
def job(slurm_bed: SlurmBed, tmp_path: Path) -> Iterator[str]:
    """A job on all nodes that does nothing."""
    script = tmp_path / "idle.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=1 --no-kill --output=/dev/null\nsleep 300\n"
    )
    job = slurm_bed.slurm("sbatch", "--parsable", str(script)).strip()
    deadline = time.monotonic() + 30
    while slurm_bed.state(job) != "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield job
    slurm_bed.slurm("scancel", job, check=False)


def to(node: str, job: str) -> SrunTransport:
    return SrunTransport(node, StepSettings(job=job, bind=False))


@pytest.mark.e2e
def test_commands_run_on_their_node(job: str) -> None:
    done = to("node3", job).run(["sh", "-c", "hostname; cat; exit 5"], timeout=20, stdin=b"from stdin")
    assert (done.exit_code, done.stdout) == (5, b"node3\nfrom stdin")
    with pytest.raises(TransportError, match="nosuch"):
        to("node3", job).run(["nosuch"], timeout=20)
    with pytest.raises(TransportError, match="node99"):
        to("node99", job).run(["true"], timeout=20)
    with pytest.raises(TransportError, match="longer than 1 s"):
        to("node3", job).run(["sleep", "20"], timeout=1)


@pytest.mark.e2e
def test_a_channel_speaks_in_lines_and_ends_with_its_process(
    job: str, slurm_bed: SlurmBed, tmp_path: Path
) -> None:
    lines: list[bytes | None] = []
    said = threading.Event()

    def on_line(line: bytes | None) -> None:
        lines.append(line)
        said.set()

    channel = to("node2", job).open(
        ["sh", "-c", 'while read line; do echo "$(hostname) $line $MARK"; done'],
        on_line=on_line,
        stderr=tmp_path / "errors",
        environment={"MARK": "m"},
    )
    for word in (b"one", b"two"):
        said.clear()
        assert channel.send(word)
        assert said.wait(10)
    assert lines == [b"node2 one m", b"node2 two m"]
    channel.kill()
    deadline = time.monotonic() + 15
    while slurm_bed.processes("node2", "while read line"):
        assert time.monotonic() < deadline, "the task outlives its channel"
        time.sleep(0.2)
    assert lines[-1] is None
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.e2e
def test_a_round_trip_takes_milliseconds(job: str, tmp_path: Path) -> None:
    said = threading.Event()
    channel = to("node4", job).open(
        ["cat"], on_line=lambda line: said.set(), stderr=tmp_path / "errors", environment={}
    )
    times = []
    for _ in range(21):
        said.clear()
        began = time.monotonic()
        channel.send(b"x")
        assert said.wait(20)
        times.append(time.monotonic() - began)
    channel.kill()
    assert sorted(times)[10] < 0.05


@pytest.mark.e2e
def test_a_step_starts_beside_another_one(job: str) -> None:
    holder = subprocess.Popen(to("node1", job).command(["sleep", "60"]))
    try:
        time.sleep(0.5)
        assert to("node1", job).run(["hostname"], timeout=10).stdout == b"node1\n"
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.e2e
def test_the_doctor_looks_at_the_nodes_of_a_job(
    job: str, slurm_bed: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = tmp_path / "bed.yaml"
    bed.write_text(PROFILE.format(storage=tmp_path / "runs"))
    command = [sys.executable, "-m", "llmtrain", "doctor", "--cluster", bed, "--quick", "--json"]
    slurm_bed.slurm("scontrol", "update", "nodename=node4", "state=down", "reason=test")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-4]")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    verdicts = {each["node"]: each["verdict"] for each in found["nodes"]}
    assert all(verdicts.pop(name) in ("fit", "warning") for name in ("node1", "node2", "node3"))
    assert verdicts.get("node4", "unreachable") == "unreachable"


@pytest.mark.e2e
@pytest.mark.engine
def test_outside_of_a_job_the_doctor_says_what_to_type_and_that_works(
    slurm_bed: SlurmBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    bed = tmp_path / "a bed.yaml"
    bed.write_text(PROFILE.format(storage=tmp_path / "runs"))
    command = ["llmtrain", "doctor", "--cluster", bed, "--json"]
    outside = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert outside.returncode == 2, outside.stderr
    typed = outside.stderr.partition("hint: `")[2].rpartition("`")[0]
    assert typed.startswith("salloc --partition=gpu --time=0-00:15:00 --nodes=4 --ntasks-per-node=1 ")
    done = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["verdict"] in ("fit", "warning") for each in found["nodes"]] == [True] * 4
    assert len(found["pairs"]) == 6 and all(each["product_flops"] for each in found["nodes"])
