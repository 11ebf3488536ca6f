"""Where chaos is made: this machine, SSH nodes, SLURM nodes. Each makes its own faults, and undoes them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.layout import RunDir
from llmtrain.run.record import read_record
from llmtrain.run.submission import read_submission
from tests.support.beds import SshBed, unavailable
from tests.support.chaos import Fault
from tests.support.slurm_beds import SlurmBed

STORAGE = "1g"
"""Size of the shared storage, more than what a launch asks for; its pages are taken as they are written."""
SHAPES = {
    1: (
        ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1"),
        ("parallel.dp=1", "parallel.tp=1", "parallel.pp=2"),
    ),
    3: (
        ("parallel.dp=3", "parallel.tp=1", "parallel.pp=1", "cluster.gpus_per_node=1"),
        ("parallel.dp=2", "parallel.tp=1", "parallel.pp=2", "cluster.gpus_per_node=2", "cluster.spares=1"),
    ),
}
"""Layouts by the number of nodes: a replica a node, or two nodes and one in reserve."""
RESUMABLE = frozenset({75})
ENDED = frozenset({1, 75, 137})
BATCH_HOST = ", the batch host"
ENDS: Mapping[str, frozenset[int]] = {"preempt": RESUMABLE, "supervisor": ENDED}
"""Exit codes that a launch may have once a fault has struck; any other fault must not end it."""


@dataclass
class Ground:
    """This machine; the others add faults to it."""

    folder: Path
    home: Path
    options: tuple[str, ...] = ()
    """Words of `launch` beside the usual ones."""
    ends: ClassVar[Mapping[str, frozenset[int]]] = ENDS
    nodes: ClassVar[int] = 1

    def strike(self, run: RunDir, fault: Fault) -> str:
        """Make a fault happen; what was struck, or nothing when there was nothing to strike."""
        with suppress(psutil.Error, ProcessLookupError, IndexError):
            match fault.kind:
                case "rank" | "agent" | "launcher" | "supervisor":
                    return kill(run, fault.kind, fault.place, signal.SIGKILL)
                case "frozen_rank":
                    return kill(run, "rank", fault.place, signal.SIGSTOP)
                case "preempt":
                    return kill(run, "supervisor", 0, signal.SIGTERM)
                case "corrupt":
                    damaged = damage_newest(run)
                    return f"{damaged}{kill(run, 'rank', fault.place, signal.SIGKILL)}"
                case "full":
                    return self.fill(fault.seconds)
        return ""

    def fill(self, seconds: float) -> str:
        """Leave the storage without room for a while."""
        with full(self.folder):
            time.sleep(seconds)
        return f"storage full for {seconds} s"

    def ends_after(self, kind: str, what: str) -> frozenset[int]:
        """Exit codes that a launch may have after a fault that has struck `what`."""
        return self.ends.get(kind, frozenset())

    def mend(self) -> None:
        """Make all nodes whole again."""

    def tick(self, run: RunDir) -> None:
        """What has to be done while a run is waited for."""


@dataclass
class SshGround(Ground):
    """Nodes of an SSH bed."""

    bed: SshBed | None = None
    nodes: ClassVar[int] = 3

    def strike(self, run: RunDir, fault: Fault) -> str:
        bed = self.bed
        assert bed is not None
        if fault.kind not in ("power", "linkdown", "crash", "freeze", "flap"):
            return super().strike(run, fault)
        node = self.pick(run, fault.place)
        if not node:
            return ""
        bed.fault("cut" if fault.kind == "flap" else fault.kind, node)
        if fault.kind == "flap":
            time.sleep(fault.seconds)
            self.mend_one(node)
        return node

    def pick(self, run: RunDir, place: int) -> str:
        """A node that the newest attempt uses and that is whole."""
        assert self.bed is not None
        attempts = read_record(run).attempts
        whole = [name for name in attempts[-1].nodes if name not in self.bed._broken] if attempts else []
        return whole[place % len(whole)] if whole else ""

    def mend_one(self, node: str) -> None:
        """Undo the faults of one node."""
        assert self.bed is not None
        others = {name: kinds for name, kinds in self.bed._broken.items() if name != node}
        self.bed._broken = {node: self.bed._broken[node]}
        SshBed.restore(self.bed)  # a SLURM bed would cancel its jobs
        self.bed._broken = others

    def mend(self) -> None:
        assert self.bed is not None
        for node in tuple(self.bed._broken):
            self.mend_one(node)


@dataclass
class SlurmGround(SshGround):
    """Nodes of a SLURM bed."""

    ends: ClassVar[Mapping[str, frozenset[int]]] = {
        **ENDS,
        "cancel": ENDED,
        "kill_job": ENDED,
        "requeue": RESUMABLE,
        "warning": RESUMABLE,
        "batch_host": RESUMABLE,
    }

    @property
    def slurm(self) -> SlurmBed:
        """The bed."""
        assert isinstance(self.bed, SlurmBed)
        return self.bed

    def strike(self, run: RunDir, fault: Fault) -> str:
        submission = read_submission(run)
        job = submission.jobs[-1] if submission is not None else "0"
        words = {
            "requeue": ("scontrol", "requeue", job),
            "cancel": ("scancel", job),
            "kill_job": ("scancel", "--signal=KILL", "--full", job),
            "warning": ("scancel", "--batch", "--signal=USR1", job),
        }
        if fault.kind in words:
            self.slurm.slurm(*words[fault.kind], check=False)
            return f"job {job}"
        match fault.kind:
            case "kill_step":
                return self.kill_step(job, fault.place)
            case "controller":
                self.slurm.daemon("ctld-kill")
                time.sleep(fault.seconds)
                self.slurm.daemon("ctld-start")
                return "slurmctld"
            case "down":
                node = self.pick(run, fault.place)
                if not node:
                    return ""
                is_host = node in self.host_of_supervisor(run)
                self.slurm._broken.setdefault(node, set()).add("down")
                self.slurm.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=chaos")
                return f"{node}{BATCH_HOST if is_host else ''}"
            case "batch_host":
                node = next(iter(self.host_of_supervisor(run)), "")
                if node:
                    self.slurm.fault("crash", node)
                return node
        return super().strike(run, fault)

    def ends_after(self, kind: str, what: str) -> frozenset[int]:
        """A batch host that is marked down though it lives has its batch step killed: the job has failed."""
        return ENDED if what.endswith(BATCH_HOST) else super().ends_after(kind, what)

    def kill_step(self, job: str, place: int) -> str:
        """End one of a job's steps, each of which is a node's agent, without a warning."""
        ids = self.slurm.slurm("squeue", "--steps", "-h", "-j", job, "-o", "%i", check=False).split()
        steps = [step for step in ids if step.rpartition(".")[2].isdigit()]
        if not steps:
            return ""
        step = steps[place % len(steps)]
        self.slurm.slurm("scancel", "--signal=KILL", step, check=False)
        return f"step {step}"

    def host_of_supervisor(self, run: RunDir) -> Iterator[str]:
        """The node that the run's supervisor is on."""
        from llmtrain.run.lease import read_holder

        holder = read_holder(run)
        if holder is not None and not holder.released and holder.process.host not in self.slurm._broken:
            yield holder.process.host

    def mend_one(self, node: str) -> None:
        self.slurm._broken[node] -= {"down"}
        if self.slurm._broken[node]:
            super().mend_one(node)
        self.slurm._broken.pop(node, None)
        self.slurm.daemon("slurmd", node)
        self.slurm.slurm("scontrol", "update", f"nodename={node}", "state=resume", check=False)

    def tick(self, run: RunDir) -> None:
        """SLURM makes a job that was queued again wait for two minutes, or for GPUs that nobody has."""
        submission = read_submission(run)
        if submission is None:
            return
        for job in submission.jobs:
            row = self.slurm.slurm("squeue", "-h", "-j", job, "-O", "State:|,Reason:|", check=False)
            if row.startswith("PENDING") and "BeginTime" in row:
                self.slurm.slurm("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            if row.startswith("PENDING") and "Resources" in row:
                self.slurm.recount_gpus()


@contextmanager
def storage() -> Iterator[Path]:
    """A small file system; nodes that are started while it is there share it. Skips or fails the test where
    there can be none."""
    if os.geteuid():
        unavailable("a small file system needs root, to be mounted")
    with tempfile.TemporaryDirectory(prefix="llmtrain-chaos-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        path.chmod(0o755)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STORAGE}", "tmpfs", path], check=True)
        try:
            yield path
        finally:
            subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Leave the small file system without room, on all nodes at once."""
    for _ in range(50):
        status = os.statvfs(folder)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        if _resize(folder, str(max(used, status.f_frsize))):  # not when more has been written meanwhile
            break
    else:
        raise AssertionError(f"{folder} could not be filled")
    try:
        yield
    finally:
        assert _resize(folder, STORAGE)


def _resize(folder: Path, size: str) -> bool:
    command = ["mount", "-o", f"remount,size={size}", str(folder)]
    return not subprocess.run(command, check=False, capture_output=True).returncode


# ---- processes, on whatever node: all of them are seen from here
WORDS = {
    "rank": ({"llmtrain.engine", "rank"}, "torch.distributed.run"),
    "launcher": ({"torch.distributed.run", "launcher"}, ""),
    "agent": ({"llmtrain.agent"}, "sweep"),
    "supervisor": ({"llmtrain.supervise"}, ""),
}
"""What the command lines of these processes hold, one of several words, and what they do not."""


def processes(run: RunDir, role: str) -> list[psutil.Process]:
    """Processes of the newest attempt of a run, in the order of their ranks or nodes."""
    has, lacks = WORDS[role]
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError):
            argv = process.cmdline()
            if not has & {*argv} or lacks in argv or not any(word.startswith(str(run.path)) for word in argv):
                continue
            place = {name: int(value) for name, value in process.environ().items() if name in PLACES}
            options = dict(itertools.pairwise(argv))
            attempt = place.get("LLMTRAIN_ATTEMPT", int(options.get("--attempt", 0)))
            order = place.get("RANK", int(options.get("--node", options.get("--node-rank", 0))))
            found.append((attempt, order, process))
    newest = max((attempt for attempt, _, _ in found), default=0)
    return [process for attempt, _, process in sorted(found, key=lambda each: each[:2]) if attempt == newest]


PLACES = ("LLMTRAIN_ATTEMPT", "RANK")


def kill(run: RunDir, role: str, place: int, number: signal.Signals) -> str:
    """Send a signal to one process of a run. Raises IndexError when there is none."""
    found = processes(run, role)
    if not found:
        raise IndexError(role)
    index = place % len(found)
    os.kill(found[index].pid, number)
    return f"{role} {index} of {len(found)}"


def damage_newest(run: RunDir) -> str:
    """Flip bits of the newest checkpoint, if there is an older one to go on from."""
    found = list_checkpoints(run.checkpoints)
    if len(found) < 2:
        return ""
    shard = next(iter(sorted(found[0].path.glob("*.safetensors"))))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0xFF
    shard.write_bytes(data)
    return f"step {found[0].step} damaged, "
