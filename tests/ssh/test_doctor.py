"""The doctor over real nodes: healthy ones are acquitted, a slow link and a slow processor convicted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from llmtrain.events.schema import AttemptStarted
from tests.support import ssh_runs
from tests.support import stand_in_runs as runs
from tests.support.beds import SshBed
from tests.support.nvml import Stub

pytestmark = [pytest.mark.e2e, pytest.mark.engine]


def doctor(profile: Path, *options: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "doctor", "--cluster", profile, "--json", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def throttled(bed: SshBed, name: str, share: float) -> Iterator[None]:
    """Let the test processes of a node run for a share of the time only, as a hot processor would."""
    namespace = bed.run(name, "readlink", "/proc/self/ns/net").strip()
    is_over = threading.Event()

    def pulse() -> None:
        while not is_over.is_set():
            mine = [each.pid for each in psutil.process_iter(["cmdline"]) if _is_test(each, namespace)]
            for number, seconds in ((signal.SIGSTOP, 0.3 * (1 - share)), (signal.SIGCONT, 0.3 * share)):
                for pid in mine:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(seconds)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _is_test(process: psutil.Process, namespace: str) -> bool:
    if "llmtrain.engine.linktest" not in (process.info["cmdline"] or []):
        return False
    with suppress(OSError):
        return str(Path(f"/proc/{process.pid}/ns/net").readlink()) == namespace
    return False


@pytest.mark.quiet
@pytest.mark.timeout(600)
def test_a_slow_link_and_a_slow_processor_are_convicted_and_used_last(bed_home, ssh_bed, tmp_path) -> None:
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, nodes=5, spares=1)
    status, found = doctor(profile)
    assert (status, found["ok"]) == (0, True), found["verdict"]
    assert {each["verdict"] for each in found["nodes"]} <= {"fit", "warning"}
    assert len(found["pairs"]) == 10 and found["links"] == []

    ssh_bed.fault("rate", "node2", "50mbit")
    with throttled(ssh_bed, "node5", 0.1):
        status, found = doctor(profile)
    assert (status, found["ok"]) == (1, False)
    slow = {
        each["node"]: [reason["message"] for reason in each["reasons"]]
        for each in found["nodes"]
        if each["verdict"] == "slow"
    }
    assert sorted(slow) == ["node2", "node5"], found["verdict"]
    assert "its link runs at" in slow["node2"][0]
    assert any("matrix products run at" in reason for reason in slow["node5"])
    ssh_bed.restore()

    # The next run, of four nodes and a spare, keeps a convicted node in reserve and says so.
    (tmp_path / "corpus").mkdir()
    run = ssh_runs.make_run(tmp_path / "runs" / "run", profile, steps=2)
    runs.use_corpus(run, runs.prepared_corpus(tmp_path / "corpus"))
    try:
        assert runs.supervise(run).wait(120) == 0, run.supervisor_log.read_text()
        [started] = [event.payload for event in runs.events(run, "attempt_started")]
        assert isinstance(started, AttemptStarted)
        assert started.nodes == ("node1", "node3", "node4", "node2")
        assert started.idle == ("node5",)
        assert "node5 is kept as a spare (slow 1 min ago: " in started.membership
        assert "node2 is needed although it was convicted (slow 1 min ago: its link" in started.membership
    finally:
        runs.clean_up(run)


def test_quick_looks_at_every_node_and_names_what_is_wrong(bed_home, ssh_bed, tmp_path) -> None:
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, nodes=4)
    ssh_bed.fault("cut", "node3")
    (tmp_path / "runs").mkdir()
    ssh_bed.run("node2", "mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(tmp_path / "runs"))
    try:
        status, found = doctor(profile, "--quick")
    finally:
        ssh_bed.run("node2", "umount", str(tmp_path / "runs"))
    assert status == 1
    by_name = {each["node"]: each for each in found["nodes"]}
    assert {name: each["verdict"] in ("fit", "warning") for name, each in by_name.items()} == {
        "node1": True, "node2": False, "node3": False, "node4": True
    }  # fmt: skip
    assert by_name["node3"]["verdict"] == "unreachable"
    reasons = [reason["message"] for reason in by_name["node2"]["reasons"]]
    assert any("is not the same folder there as here" in reason for reason in reasons)
    assert any(reason.startswith("disk: 1.0 MB of 1.0 MB free") for reason in reasons), reasons
    machine = by_name["node1"]["report"]["health"]["machine"]
    assert machine["host"] == "node1" and machine["torch"] and machine["shared_memory"]["path"] == "/dev/shm"
    assert found["verdict"].startswith(
        "2 of 4 nodes are fit, 4 are needed: node2 is unfit; node3 is unreachable"
    )


NODES_OF_GPUS = """#!/bin/sh
# Every node has GPUs of its own: a library that answers as the driver of that node would.
export LD_LIBRARY_PATH={folder} NVML_STUB={folder}/$(hostname)
exec {python} "$@"
"""


def test_gpus_of_every_node_are_judged_and_compared(bed_home, ssh_bed, tmp_path) -> None:
    (tmp_path / "nvml").mkdir()
    stub = Stub(tmp_path / "nvml")
    stub.environment("uuid * GPU-a", name="node1")
    stub.environment("uuid * GPU-b", "return:nvmlDeviceGetHandleByIndex_v2 3 15", name="node2")
    stub.environment("uuid * GPU-c", "driver * 550.90.07", "ecc 6 2", name="node3")
    stub.environment("uuid * GPU-d", "links_down 1 1", name="node4")
    stub.environment("return:nvmlInitWithFlags * 18", name="node5")
    python = tmp_path / "python"
    python.write_text(NODES_OF_GPUS.format(folder=stub.folder, python=sys.executable))
    python.chmod(0o755)
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", ssh_bed, nodes=5, python=str(python))
    settings = ("accelerator=h100-sxm", "gpus_per_node=8", "intra_node.kind=nvlink4")
    status, found = doctor(profile, "--quick", *(word for each in settings for word in ("--set", each)))
    assert status == 1
    said = {
        each["node"]: (each["verdict"], [reason["message"] for reason in each["reasons"]])
        for each in found["nodes"]
    }
    busy = ("cores:", "memory:", "disk:", "processes:", "locked memory:")
    said = {
        name: (word, [text for text in why if not text.startswith(busy)])
        for name, (word, why) in said.items()
    }
    h100 = "NVIDIA H100 80GB HBM3"
    assert said["node1"][1] == []
    assert said["node2"] == (
        "unfit",
        [
            "GPUs: 7, the profile promises 8",
            "GPU 3: does not answer: GPU is lost",
            f"GPUs: 7 x {h100}, most nodes have 8 x {h100}",
        ],
    )
    assert said["node3"] == ("unfit", ["GPU driver: 550.90.07, most nodes have 580.65.06"])
    assert said["node4"] == ("warning", [f"GPU 1: {h100}, 85.5 GB: 1 of 18 NVLinks are down"])
    assert said["node5"][0] == "unfit"
    assert "the profile promises 8 (RM has detected an NVML/RM version mismatch.)" in said["node5"][1][0]
    uuids = {each["node"]: each["report"]["health"]["machine"]["gpus"]["gpus"] for each in found["nodes"]}
    assert [gpu["uuid"] for gpu in uuids["node4"]] == [f"GPU-d-{index}" for index in range(8)]
