"""The doctor's facts on this machine, and its judgement on invented ones."""

import dataclasses
import os
import stat

import pytest

from llmtrain.backends.health import judge
from llmtrain.cli.doctor import hint_text
from llmtrain.errors import ExitStatus, Problem
from llmtrain.observe.doctor import Diagnosis, diagnose
from llmtrain.probe import machine as probe
from llmtrain.probe.facts import Disk, Gpu, Gpus, IbPort, Machine, WriteTest, Xid
from llmtrain.probe.machine import probe_disk, probe_write

GB = 10**9
HEALTHY = Machine(
    host="node1",
    system="Linux",
    python="3.11.7",
    torch="2.13.0",
    cores=8,
    load=0.1,
    memory_total=64 * GB,
    memory_available=60 * GB,
    shared_memory=Disk(path="/dev/shm", total=32 * GB, free=32 * GB, inodes_total=10, inodes_free=10),
    open_files=65536,
    locked_memory=-1,
    host_resolves="10.0.0.1",
    gpus=Gpus(reason="no driver"),
)
DISK = Disk(path="/runs", total=1000 * GB, free=900 * GB, inodes_total=10**6, inodes_free=10**6)
WRITE = WriteTest(seconds=0.01, bytes=1 << 20)
GPU = Gpu(index=0, name="A100", uuid="u", memory_total=80 * GB, memory_used=0)

XID = Xid(code=79, device="0000:3b:00", text="GPU has fallen off the bus.")
PORT = IbPort(name="mlx5_0/1", state="ACTIVE", physical="LinkUp", rate="400 Gb/sec (4X NDR)")
DOWN = IbPort(name="mlx5_1/1", state="DOWN", physical="Polling", rate="10 Gb/sec")
BROKEN = Gpus(reason="RM has detected an NVML/RM version mismatch.", is_broken=True)
LOST = Gpus(driver="580", reason="none of them answers", silent=("3: GPU is lost",))


def with_gpu(**changes) -> Machine:
    gpu = dataclasses.replace(GPU, **changes)
    return dataclasses.replace(HEALTHY, gpus=Gpus(driver="580", gpus=(gpu,)))


def levels(machine=HEALTHY, disk=DISK, write=WRITE, gpus=0) -> dict[str, str]:
    return {check.name: check.level for check in judge(machine, disk, write, gpus=gpus)}


def test_a_healthy_machine_has_nothing_to_look_at() -> None:
    assert set(levels().values()) == {"ok"}
    assert set(levels(with_gpu(nvlinks_up=18, persistence=True)).values()) == {"ok"}
    healthy = dataclasses.replace(with_gpu(), infiniband=(PORT,), xids=(Xid(code=31, device="x"),))
    assert set(levels(healthy, gpus=1).values()) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "level"),
    [
        ({"machine": dataclasses.replace(HEALTHY, torch="")}, "torch", "failure"),
        ({"machine": dataclasses.replace(HEALTHY, load=20.0)}, "cores", "warning"),
        ({"machine": dataclasses.replace(HEALTHY, memory_available=3 * GB)}, "memory", "warning"),
        ({"machine": dataclasses.replace(HEALTHY, memory_available=GB // 10)}, "memory", "failure"),
        ({"machine": dataclasses.replace(HEALTHY, open_files=256)}, "open files", "warning"),
        ({"machine": dataclasses.replace(HEALTHY, host_resolves="")}, "host name", "warning"),
        ({"disk": dataclasses.replace(DISK, free=3 * GB)}, "disk", "warning"),
        ({"disk": dataclasses.replace(DISK, free=GB // 10)}, "disk", "failure"),
        ({"disk": dataclasses.replace(DISK, inodes_free=5)}, "inodes", "failure"),
        ({"disk": dataclasses.replace(DISK, inodes_free=500)}, "inodes", "warning"),
        ({"disk": dataclasses.replace(DISK, inodes_total=0, inodes_free=0)}, "inodes", "ok"),
        ({"write": WriteTest(error="Read-only file system")}, "write test", "failure"),
        ({"write": dataclasses.replace(WRITE, seconds=3.0)}, "write test", "warning"),
        ({"write": dataclasses.replace(WRITE, clock_offset=-8.0)}, "clock", "warning"),
        ({"machine": with_gpu(row_remap_failed=True)}, "GPU 0", "failure"),
        ({"machine": with_gpu(row_remap_pending=True)}, "GPU 0", "warning"),
        ({"machine": with_gpu(uncorrected_ecc_errors=3)}, "GPU 0", "warning"),
        ({"machine": with_gpu(memory_used=20 * GB)}, "GPU 0", "warning"),
        ({"machine": with_gpu(throttle=("too hot (hardware)",))}, "GPU 0", "warning"),
        ({"machine": with_gpu(nvlinks_up=17, nvlinks_down=1)}, "GPU 0", "warning"),
        ({"machine": with_gpu(processes=(4711,))}, "GPU 0", "warning"),
        ({"machine": with_gpu(persistence=False)}, "GPU 0", "warning"),
        ({"machine": dataclasses.replace(with_gpu(), locked_memory=65536)}, "locked memory", "warning"),
        ({"machine": dataclasses.replace(with_gpu(), xids=(XID,))}, "GPU error (Xid)", "failure"),
        ({"machine": dataclasses.replace(HEALTHY, processes=1024)}, "processes", "warning"),
        ({"machine": dataclasses.replace(HEALTHY, infiniband=(PORT, DOWN))}, "InfiniBand", "warning"),
        ({"machine": dataclasses.replace(HEALTHY, infiniband=(DOWN,))}, "InfiniBand", "warning"),
        ({"disk": dataclasses.replace(DISK, inodes_free=0)}, "inodes", "failure"),
        ({"machine": dataclasses.replace(HEALTHY, gpus=BROKEN)}, "GPUs", "warning"),
        ({"machine": dataclasses.replace(HEALTHY, gpus=BROKEN), "gpus": 8}, "GPUs", "failure"),
        ({"machine": dataclasses.replace(HEALTHY, gpus=LOST)}, "GPU 3", "failure"),
        ({"machine": dataclasses.replace(HEALTHY, xids=(XID,))}, "GPU error (Xid)", "failure"),
        ({"gpus": 8}, "GPUs", "failure"),
        ({"machine": with_gpu(), "gpus": 8}, "GPUs", "failure"),
    ],
)
def test_what_is_wrong_is_found(changes, name, level) -> None:
    found = levels(**changes)
    assert found.pop(name) == level
    assert set(found.values()) == {"ok"}, "nothing else is blamed"


@pytest.mark.parametrize(("free", "status"), [(900 * GB, ExitStatus.DONE), (1, ExitStatus.FAILED)])
def test_only_a_failure_fails(free, status) -> None:
    disk = dataclasses.replace(DISK, free=free)
    checks = tuple(judge(HEALTHY, disk, WRITE))
    diagnosis = Diagnosis(machine=HEALTHY, disk=disk, write=WRITE, checks=checks)
    assert diagnosis.exit_status is status
    assert diagnosis.document()["ok"] is (status is ExitStatus.DONE)


def test_this_machine(tmp_path) -> None:
    diagnosis = diagnose(tmp_path / "runs")
    machine = diagnosis.machine
    assert machine.cores == len(os.sched_getaffinity(0))
    assert 0 < machine.memory_available <= machine.memory_total
    assert machine.torch and diagnosis.write.error == ""
    assert bool(machine.gpus.gpus) != bool(machine.gpus.reason)
    assert not (tmp_path / "runs").exists(), "the doctor leaves nothing behind"


def test_write_test_of_a_folder_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert probe_write(tmp_path / "file").error
    assert probe_write(tmp_path, size=1000).error == ""
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path) -> None:
    found = probe_disk(tmp_path / "a" / "b")
    assert found is not None and found.path == str(tmp_path)


def test_package_version_without_import() -> None:
    assert probe.package_version("torch").startswith("2.")
    assert probe.package_version("no-such-package-here") == ""


@pytest.mark.parametrize(
    ("where", "message", "head"),
    [
        ("", "n1: cannot be resolved", "n1: cannot be resolved"),
        ("", "no answer", "n1: no answer"),
        ("disk", "is full", "disk: is full"),
    ],
)
def test_a_hint_says_once_whose_it_is(where: str, message: str, head: str) -> None:
    assert hint_text("n1", Problem(where, message, "do this")) == f"{head}\n  hint: do this"
