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
from llmtrain.backends.slurm import reach
from llmtrain.backends.slurm.backend import SlurmBackend
from llmtrain.backends.slurm.calls import SlurmCalls
from llmtrain.backends.slurm.refusals import SlurmError, SlurmUnreachableError
from llmtrain.backends.slurm.states import LEAVING, JobRow
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.load import load_profile
from llmtrain.transport.base import Completed, TransportError
from llmtrain.transport.local import LocalTransport
from llmtrain.transport.srun import SrunTransport, StepSettings
from tests.slurm.conftest import PROFILE
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


class Answers:
    """A transport that answers every command with the same text, or with the end of a time limit."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def run(self, argv: tuple[str, ...], *, timeout: float, stdin: bytes = b"") -> Completed:
        if self.text is None:
            raise TransportError(f"`{argv[0]}` took longer than {timeout:g} s and was killed")
        return Completed(argv=argv, exit_code=0, stdout=self.text.encode(), stderr=b"")


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


def test_every_call_has_a_time_limit() -> None:
    calls = SlurmCalls(LocalTransport(), 0.5)
    began = time.monotonic()
    with pytest.raises(Exception, match="took longer than"):
        calls._run("sleep", "30")
    assert time.monotonic() - began < 5
    silent = SlurmCalls(Answers(None), 0.1)  # type: ignore[arg-type]
    assert silent.account(["1"]) == [] and silent.nodes("n1") == {}
    assert silent.hostnames("node[08-10],x") == ["node08", "node09", "node10", "x"]


class Refuses:
    """A transport whose commands fail with some words."""

    def __init__(self, said: str) -> None:
        self.said, self.asked = said, 0

    def run(self, argv: tuple[str, ...], *, timeout: float, stdin: bytes = b"") -> Completed:
        self.asked += 1
        return Completed(argv=argv, exit_code=1, stdout=b"", stderr=self.said.encode())


@pytest.mark.parametrize(
    ("said", "tries", "status"),
    [
        ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", 3, 1),
        ("sinfo: fatal: Unable to process configuration file", 1, 2),
        ("sinfo: fatal: Could not establish a configuration source", 1, 1),
    ],
)
def test_only_a_controller_that_may_come_back_is_asked_again(
    said: str, tries: int, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reach, "PAUSE_SECONDS", 0.0)
    way = Refuses(said)
    with pytest.raises(SlurmError) as caught:
        reach.known_partitions(SlurmCalls(way, 5.0))  # type: ignore[arg-type]
    assert (way.asked, caught.value.exit_status) == (tries, status)
    assert caught.value.problems[0].may_pass == (status == 1)
    assert said.removeprefix("sinfo: ") in str(caught.value)
    assert [record.getMessage()[-18:] for record in caplog.records] == [
        f"try {number} of 3 follows" for number in range(2, tries + 1)
    ]


def test_sinfo_that_hangs_is_told_of_and_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reach, "SLOW_SECONDS", 0.05)
    calls = SlurmCalls(LocalTransport(), 0.3)
    calls.partitions = lambda: calls._run("sh", "-c", "echo waiting for godot >&2; sleep 9")  # type: ignore
    calls.controller_answers = lambda: False  # type: ignore[method-assign]
    with pytest.raises(SlurmError, match="s and was killed; it said: waiting for godot"):
        reach.known_partitions(calls)
    assert "sinfo" in caplog.text and "follows" not in caplog.text


class Cluster:
    """A transport to a cluster where sinfo does one thing and scontrol says another."""

    def __init__(self, sinfo: str, ping: str) -> None:
        self.sinfo, self.ping = sinfo, ping
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: tuple[str, ...], *, timeout: float, stdin: bytes = b"") -> Completed:
        self.asked.append(argv)
        if argv[0] == "sinfo":
            raise TransportError(self.sinfo)
        return Completed(argv=argv, exit_code="UP" not in self.ping, stdout=self.ping.encode(), stderr=b"")


SLOW = "`sinfo` took longer than 5 s and was killed"


@pytest.mark.parametrize(
    ("sinfo", "ping", "is_refused", "told"),
    [
        (
            SLOW,
            "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n",
            False,
            [f"{SLOW}; the part"],
        ),
        (f"login: {SLOW}", "Slurmctld(primary) at a is DOWN\n", True, []),
        ("`sinfo` cannot be started: No such file or directory", "", False, []),
        ("login: `sinfo` is not there", "", False, []),
        ("login: the connection is lost", "Slurmctld(primary) at a is UP\n", True, []),
    ],
)
def test_sinfo_alone_refuses_nothing(
    sinfo: str, ping: str, is_refused: bool, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = SlurmCalls(Cluster(sinfo, ping), 5.0)  # type: ignore[arg-type]
    if is_refused:
        with pytest.raises(SlurmUnreachableError, match=sinfo):
            reach.known_partitions(calls)
    else:
        assert reach.known_partitions(calls) == []
    heard = [record.getMessage() for record in caplog.records]
    assert [text[: len(start)] for text, start in zip(heard, told, strict=True)] == told


def test_partitions_that_are_hidden_are_known_too() -> None:
    way = Cluster("`sinfo` is not there", "")
    assert SlurmCalls(way, 5.0).partitions() == []  # type: ignore[arg-type]
    assert "--all" in way.asked[0]


def test_a_configuration_that_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "slurm.conf")
    with pytest.raises(SlurmError) as caught:
        SlurmCalls(LocalTransport(), 30.0, missing).queue(["1"])
    [problem] = caught.value.problems
    assert (problem.where, caught.value.exit_status) == ("SLURM_CONF", 2)
    assert missing in problem.message and "no such file" in problem.message
    os.mkfifo(missing)
    with pytest.raises(SlurmError, match="no regular file"):
        SlurmCalls(LocalTransport(), 30.0, missing).queue(["1"])


def test_only_the_first_call_that_a_person_waits_for_looks_at_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "slurm.conf"
    file.write_text("")
    calls = SlurmCalls(Answers(""), 5.0, str(file))  # type: ignore[arg-type]
    assert calls.queue(["1"]) == []
    file.unlink()
    assert calls.queue(["1"]) == []
    environment = {"SLURM_CONF": str(file), "PATH": ""}
    assert SlurmBackend(profile(tmp_path), environment=environment)._calls._configuration == str(file)
    supervisor = SlurmBackend(profile(tmp_path), environment={**environment, "SLURM_JOB_ID": "7"})
    assert supervisor._calls._configuration == ""


def test_a_job_that_is_leaving_is_given_time() -> None:
    """Twice on its way out, then gone from the queue; one that stays is told as it is."""

    def leaving(row: JobRow) -> bool:
        return row.state == LEAVING

    rows = [JobRow(id="7", state=LEAVING), JobRow(id="7", state=LEAVING), None]
    calls = SlurmCalls(Answers(None), 0.1)  # type: ignore[arg-type]
    calls.queue = lambda jobs: [row] if (row := rows.pop(0)) else []  # type: ignore[method-assign]
    assert calls.settled(["7"], 30.0, leaving) is None and rows == []
    calls.queue = lambda jobs: [JobRow(id="7", state=LEAVING)]  # type: ignore[method-assign]
    assert calls.settled(["7"], 0.0, leaving) == JobRow(id="7", state=LEAVING)


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
