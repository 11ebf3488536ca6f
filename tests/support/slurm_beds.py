"""A real SLURM cluster as a fixture: slurmctld and a slurmd a node, on the nodes of an SSH bed."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.beds import SCRIPTS, BedError, SshBed, _free_slot, unavailable

USER = "llmtrain-bed"
"""An ordinary user; root is an administrator of SLURM and may do what others may not."""


@dataclass
class SlurmBed(SshBed):
    """Nodes node1 .. nodeN under one controller, partitions `gpu` (all nodes) and `debug` (node1)."""

    @property
    def conf(self) -> Path:
        """What SLURM_CONF names."""
        return self.work / "slurm" / "slurm.conf"

    def slurm(self, *argv: str, check: bool = True) -> str:
        """Standard output of a SLURM command, as the administrator."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """SLURM's word for a job."""
        return self.slurm("squeue", "--states=all", "-h", "-j", job, "-O", "State:|").strip().rstrip("|")

    def restarts(self, job: str) -> int:
        """How often a job was started again."""
        text = self.slurm("squeue", "--states=all", "-h", "-j", job, "-O", "RestartCnt:|")
        return int(text.strip().rstrip("|"))

    def start_now(self, job: str) -> None:
        """Let a job that was queued again start at once; SLURM makes it wait for two minutes."""
        self.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")

    def daemon(self, *arguments: str) -> None:
        """A fault of the scheduler: `kill NODE`, `slurmd NODE`, `ctld-kill`, `ctld-stop`, `ctld-start`."""
        self._slurm_script(*arguments, str(self.work))

    def up(self) -> None:
        """Start the nodes and the daemons; what an earlier owner of the slot left is removed first."""
        owner = Path(f"/run/bed-{self.variables['BED_NAME']}/work")
        if owner.exists() and (left := owner.read_text().strip()) != str(self.work):
            self._slurm_script("down", left, check=False)
        self._slurm_script("up", str(len(self.names)), str(self.work))

    def down(self) -> None:
        """Remove everything."""
        self._slurm_script("down", str(self.work))

    def restore(self) -> None:
        """Undo every fault, end every job, and wait until all nodes are free again."""
        self.slurm("scancel", "--signal=KILL", "--full", "--partition=gpu", check=False)
        self.slurm("scancel", "--partition=gpu", check=False)
        broken = {name for name, kinds in self._broken.items() if kinds & {"power", "crash"}}
        super().restore()
        for name in self.names:
            self._slurm_script("slurmd", name, str(self.work))
            if name in broken:
                self.slurm("scontrol", "update", f"nodename={name}", "state=idle", check=False)
        self._wait_idle()
        if self.recount_gpus():
            self._wait_idle()

    def recount_gpus(self) -> bool:
        """Slurm 22.05 miscounts the GPUs of a job that lost a node and was started again on others: they stay
        taken, on idle nodes, and no job that wants them starts. A controller that starts counts anew, as an
        administrator would have it do. (One that is killed has saved an older state, in which the job still
        runs; that takes it a minute to set right.) False when there was nothing to do."""
        rows = self.slurm("sinfo", "-h", "-N", "-p", "gpu", "-O", "StateLong:|,GresUsed:|").splitlines()
        if not any(row.startswith("idle|") and ":0(" not in row for row in rows):
            return False
        self.daemon("ctld-stop")
        self.daemon("ctld-start")
        return True

    def _wait_idle(self) -> None:
        began = time.monotonic()
        while True:
            states = self.slurm("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").splitlines()
            if all(line.endswith(" idle") for line in states):
                return
            for line in states:
                name, _, state = line.partition(" ")
                if state.startswith("completing") and time.monotonic() - began > 15:
                    # A node whose last word a dead controller missed says it again only after minutes.
                    self.slurm("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
                if state.startswith(("down", "drain")) and not state.endswith("*"):
                    self.slurm("scontrol", "update", f"nodename={name}", "state=resume", check=False)
            if time.monotonic() - began > 90:
                raise BedError(f"nodes do not come back: {states}")
            time.sleep(0.3)

    def _slurm_script(self, *arguments: str, check: bool = True) -> None:
        done = subprocess.run(
            [SCRIPTS / "slurm_bed.sh", *arguments],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if check and done.returncode:
            raise BedError(f"slurm_bed.sh {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def _slurm_bed() -> Iterator[SlurmBed]:
    with ExitStack() as stack:
        yield start_slurm_bed(stack)


def start_slurm_bed(stack: ExitStack, nodes: int = 4) -> SlurmBed:
    """A bed of so many nodes, until the stack is closed; skips or fails the test when there can be none."""
    if os.geteuid():
        unavailable("a SLURM bed needs root, for namespaces and daemons")
    slot, lock = _free_slot()
    stack.callback(lock.close)
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmtrain-bed-")))
    work.chmod(0o755)
    bed = SlurmBed(
        work=work,
        names=tuple(f"node{index}" for index in range(1, nodes + 1)),
        variables={"BED_NAME": f"lt{slot}", "BED_NET": f"10.77.{100 + slot}"},
        net=f"10.77.{100 + slot}",
    )
    try:
        stack.callback(bed.down)
        bed.up()
    except BedError as error:
        unavailable(str(error))
    return bed


@pytest.fixture
def slurm_bed(_slurm_bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBed]:
    """Four nodes, all idle again after the test; SLURM's commands find it."""
    monkeypatch.setenv("SLURM_CONF", str(_slurm_bed.conf))
    yield _slurm_bed
    _slurm_bed.restore()


@pytest.fixture
def bed_user() -> Iterator[str]:
    """The name of an ordinary user, whom the nodes know too."""
    try:
        pwd.getpwnam(USER)
    except KeyError:
        subprocess.run(["useradd", "--create-home", "--password", "*", USER], check=True)
    yield USER
    subprocess.run(["pkill", "-KILL", "-u", USER], check=False)
    subprocess.run(["userdel", "--remove", USER], check=False, capture_output=True)


def python_for_everybody(folder: Path) -> Path:
    """An interpreter that any user may run, with llmtrain and all it needs; root's often lies in /root."""
    repository = Path(__file__).parents[2]
    packages = sysconfig.get_paths()["purelib"]
    known = (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")
    public = [base for base in known if Path(base).exists() and _is_public(Path(base).resolve())]
    if not public:
        unavailable(f"there is no Python 3.{sys.version_info.minor} that an ordinary user may run")
    for needed in (repository, Path(packages)):
        if not _is_public(needed):
            unavailable(f"an ordinary user may not enter {needed} (chmod a+x what leads there)")
    subprocess.run([public[0], "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python3*/site-packages")
    (site / "shared.pth").write_text(f"{repository}\n{packages}\n")
    return folder / "bin" / "python"


def _is_public(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in [path, *path.parents])
