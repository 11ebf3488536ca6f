"""`launch`, `stop`, `resume` and `status` on a real SLURM cluster, as an ordinary user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from tests.support.contract import losses
from tests.support.launches import EIGHT_RANKS, SMALL, sets
from tests.support.slurm_beds import SlurmBed, python_for_everybody
from tests.support.stand_in_runs import step_reached, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.engine]


class Shell:
    """A login shell of an ordinary user on the head node."""

    def __init__(self, user: str, python: Path, conf: Path, folder: Path) -> None:
        self.user, self.python, self.conf, self.folder = user, python, conf, folder

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "SLURM_CONF": str(self.conf),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return subprocess.Popen(
            [*command, str(self.python), "-m", "llmtrain", *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, status: int = 0, seconds: float = 240) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == status, f"exit code {process.returncode}:\n{out}\n{err}"
        return out, err


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="llmtrain-python-") as folder:
        Path(folder).chmod(0o755)
        yield python_for_everybody(Path(folder) / "venv")


@pytest.fixture
def shell(slurm_bed: SlurmBed, bed_user: str, python: Path, shared: Path, profile: Path) -> Shell:
    home = shared / "home"
    home.mkdir()
    for folder in (home, shared / "runs"):
        folder.mkdir(exist_ok=True)
        os.chown(folder, *_ids(bed_user))
    return Shell(bed_user, python, slurm_bed.conf, home)


def _ids(user: str) -> tuple[int, int]:
    import pwd

    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid


def launch(profile: Path, run: RunDir, *overrides: str) -> list[str]:
    values = sets(*SMALL, *EIGHT_RANKS, *overrides)
    return ["launch", "tiny", "--cluster", str(profile), "--run-dir", str(run.path), *values]


def test_the_same_losses_as_local_over_a_warning_and_a_requeue(
    shell: Shell, slurm_bed: SlurmBed, profile: Path, shared: Path
) -> None:
    # By the same interpreter, whose library is the text that is trained on.
    local = RunDir(shared / "runs" / "local")
    shell.run("launch", "tiny", "--run-dir", str(local.path), *sets(*SMALL, *EIGHT_RANKS))
    run = RunDir(shared / "runs" / "bed")
    process = shell.start(*launch(profile, run))
    wait_for(lambda: step_reached(run, 4), 180, "step 4")
    job = json.loads(run.submission_json.read_text())["jobs"][0]
    slurm_bed.slurm("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: slurm_bed.state(job) == "PENDING", 60, "the job to be queued again")
    slurm_bed.start_now(job)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "the scheduler goes on with the run" in err
    attempts = read_record(run).attempts
    assert [attempt.outcome for attempt in attempts] == ["stopped", "completed"], attempts
    assert losses(run) == losses(local)
    assert len(losses(run)) == 14
    logs = sorted(path.name for path in run.attempt(2).logs.glob("rank-*.log"))
    assert logs == [f"rank-{rank:05d}.log" for rank in range(8)]


def test_a_job_in_the_queue(shell: Shell, slurm_bed: SlurmBed, profile: Path, shared: Path) -> None:
    """What waits is shown, is not submitted twice, leaves the queue when asked, and can be resumed."""
    slurm_bed.slurm("sbatch", "--nodes=4", "--exclusive", "--time=10", "--wrap=sleep 200", "-o", "/dev/null")
    run = RunDir(shared / "runs" / "bed")
    _, err = shell.run(*launch(profile, run), "--detach")
    assert "goes on by itself (slurm://" in err
    wait_for(lambda: "Resources" in shell.run("status", str(run.path))[1], 20, "a reason")

    def job_now() -> dict[str, Any]:
        return json.loads(shell.run("status", str(run.path), "--json")[0])["job"]

    # The scheduler estimates the start in a pass of its own, up to half a minute later.
    wait_for(lambda: job_now()["expected_start"], 60, "an expected start")
    job = job_now()
    assert (job["state"], job["raw"]) == ("pending", "PENDING")
    assert job["expected_start"] > time.time()
    _, err = shell.run("resume", str(run.path), status=2)
    assert "of this run is still there (pending" in err
    _, err = shell.run("stop", str(run.path))
    assert "taken out of the queue" in err
    process = shell.start("resume", str(run.path))
    wait_for(
        lambda: json.loads(run.submission_json.read_text())["jobs"] != [job["handle"][8:]], 20, "a new job"
    )
    assert process.stderr is not None
    heard = ""
    while "waits (" not in heard:
        line = process.stderr.readline()
        assert line, heard
        heard += line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "taken out of the queue" in err


def test_stop_and_resume(shell: Shell, slurm_bed: SlurmBed, profile: Path, shared: Path) -> None:
    run = RunDir(shared / "runs" / "bed")
    shell.run(*launch(profile, run, "train.steps=30"), "--detach")
    wait_for(lambda: step_reached(run, 4), 180, "step 4")
    shell.run("stop", str(run.path))
    assert read_record(run).exit_status == 75
    job = json.loads(run.submission_json.read_text())["jobs"][0]
    shell.run("resume", str(run.path))  # At once: the job has left.
    assert not run.stop_file.exists()
    assert slurm_bed.state(job) == "FAILED"
    assert len(losses(run)) == 30
    assert slurm_bed.restarts(job) == 0


def test_a_job_that_slurm_kills_is_resumable_at_once(
    shell: Shell, slurm_bed: SlurmBed, profile: Path, shared: Path
) -> None:
    """Its lease still looks fresh; SLURM's word counts."""
    # By the same interpreter, whose library is the text that is trained on.
    local = RunDir(shared / "runs" / "local")
    shell.run("launch", "tiny", "--run-dir", str(local.path), *sets(*SMALL, *EIGHT_RANKS))
    run = RunDir(shared / "runs" / "bed")
    process = shell.start(*launch(profile, run, "train.steps=400"))
    wait_for(lambda: step_reached(run, 4), 180, "step 4")
    job = json.loads(run.submission_json.read_text())["jobs"][0]
    slurm_bed.slurm("scancel", "--signal=KILL", "--full", job)
    slurm_bed.slurm("scancel", job)
    _, err = process.communicate(timeout=90)
    assert process.returncode in (75, 137), err
    assert "llmtrain resume" in err
    shell.run("resume", str(run.path), "--detach")
    shell.run("stop", str(run.path), "--now")


REFUSED: Sequence[tuple[str, int, str]] = (
    ("partition=nosuch", 2, "there is no partition `nosuch`\n  hint: known: debug, gpu"),
    (
        "constraint=nosuch",
        2,
        "backend.slurm.constraint: sbatch refuses the job: Invalid feature specification",
    ),
    ("nodelist=node77", 2, "backend.slurm.nodelist: sbatch refuses the job: Invalid node name specified"),
    ("gres=gpu:99", 2, "Requested node configuration is not available"),
    ("mem=9999G", 2, "backend.slurm.mem: sbatch refuses the job: Memory specification can not be satisfied"),
    ("reservation=nosuch", 2, "backend.slurm.reservation: sbatch refuses the job"),
    ("mail_type=nosuch", 2, "backend.slurm.mail_type: sbatch refuses the job"),
    ("extra.nosuch=1", 2, "backend.slurm.extra: sbatch refuses the job: unrecognized option '--nosuch=1'"),
    ("extra.begin=yesterday", 2, "`--begin` is set by llmtrain"),
    ("extra.deadline=yesterday", 2, "backend.slurm.extra: sbatch refuses the job"),
    ("partition=debug", 2, "SLURM would never start this job: Partition"),
    ("time=10s", 2, "a time limit of 10 s is less than Slurm's shortest"),
)


def test_what_slurm_refuses_leaves_nothing_behind(
    shell: Shell, slurm_bed: SlurmBed, profile: Path, shared: Path
) -> None:
    for setting, status, words in REFUSED:
        run = RunDir(shared / "runs" / "bed")
        _, err = shell.run(
            *launch(profile, run, f"cluster.backend.slurm.{setting}"), "--detach", status=status
        )
        assert words in err, setting
        assert "hint: " in err
        assert not run.path.exists(), setting
    many = RunDir(shared / "runs" / "many")
    _, err = shell.run(*launch(profile, many, "cluster.nodes=9", "cluster.spares=5"), "--detach", status=2)
    assert "SLURM would never start this job" in err and not many.path.exists()
    assert slurm_bed.slurm("squeue", "-h") == ""


def test_an_absent_controller(shell: Shell, slurm_bed: SlurmBed, profile: Path, shared: Path) -> None:
    slurm_bed.daemon("ctld-kill")
    try:
        run = RunDir(shared / "runs" / "bed")
        arguments = launch(profile, run)
        _, err = shell.run(*arguments, "--detach", status=1)
        assert "does not answer" in err and "try 3 of 3 follows" in err and "hint: " in err
        assert not run.path.exists(), "it was asked before anything was written"
    finally:
        slurm_bed.daemon("ctld-start")
    shell.run(*arguments, "--detach")
    shell.run("stop", str(run.path), "--now")
