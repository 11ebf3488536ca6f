"""GPUs that are not there: the real pynvml and the real doctor over a library that answers as NVML does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nvml import Stub

NOT_SUPPORTED, NO_PERMISSION, NOT_LOADED, GPU_LOST, MISMATCH, UNKNOWN = 3, 4, 9, 15, 18, 999
"""nvmlReturn_t (nvml.h)."""
OPTIONAL = (
    "TotalEccErrors",
    "RemappedRows",
    "CurrentClocksEventReasons",
    "CurrentClocksThrottleReasons",
    "PersistenceMode",
    "ComputeRunningProcesses_v3",
    "NvLinkState",
)
JUDGE = """
import json, os, sys
from dataclasses import asdict
from llmtrain.backends.health import judge
from llmtrain.probe.machine import probe_machine
for promised, lines in json.load(sys.stdin):
    with open(os.environ["NVML_STUB"], "w") as file:
        file.write("\\n".join(lines))
    checks = judge(probe_machine(), None, None, gpus=promised)
    print(json.dumps([asdict(check) for check in checks if "GPU" in check.name]))
"""
GPU = "NVIDIA H100 80GB HBM3, 85.5 GB"
CASES: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, str]]]] = {
    "eight healthy ones": ((), {}),
    "memory errors": (
        ("ecc 2 7",),
        {"GPU 2": ("warning", f"{GPU}: 7 uncorrected memory errors")},
    ),
    "more memory errors than 32 bits count": (
        ("ecc 2 5000000000",),
        {"GPU 2": ("warning", f"{GPU}: 5000000000 uncorrected memory errors")},
    ),
    "a row that waits": (
        ("remap_pending 1 1",),
        {"GPU 1": ("warning", f"{GPU}: a memory row waits for its remapping")},
    ),
    "a row beyond repair": (
        ("remap_failed 7 1", "ecc 7 3"),
        {"GPU 7": ("failure", f"{GPU}: a memory row could not be remapped")},
    ),
    "heat": (("clocks 0 0x45",), {"GPU 0": ("warning", f"{GPU}: clocks held down: too hot (hardware)")}),
    "heat, and a driver that knows the old name only": (
        ("clocks 0 0xa0", "return:nvmlDeviceGetCurrentClocksEventReasons * 13"),
        {"GPU 0": ("warning", f"{GPU}: clocks held down: too hot (driver), power brake")},
    ),
    "idle, capped and set clocks": (("clocks * 0x107",), {}),
    "persistence": (("persistence 4 0",), {"GPU 4": ("warning", f"{GPU}: persistence mode is off")}),
    "links": (("links_down 5 2",), {"GPU 5": ("warning", f"{GPU}: 2 of 18 NVLinks are down")}),
    "a bridge of two links": (
        (
            *(f"return:nvmlDeviceGetNvLinkState {gpu} {NOT_SUPPORTED}" for gpu in range(6)),
            "links_down 6 17",
        ),
        {"GPU 6": ("warning", f"{GPU}: 17 of 18 NVLinks are down")},
    ),
    "others' work": (
        ("processes 3 3", "used 3 40000000000"),
        {"GPU 3": ("warning", f"{GPU}: 40.0 GB in use by others (pids 4711 4712 4713)")},
    ),
    "nothing optional is supported": (
        tuple(f"return:nvmlDeviceGet{name} * {NOT_SUPPORTED}" for name in OPTIONAL),
        {},
    ),
    "too few": (("count * 7",), {"GPUs": ("failure", "7, the profile promises 8")}),
    "none": (("count * 0",), {"GPUs": ("failure", "0, the profile promises 8 (the driver sees no GPU)")}),
    "one off the bus": (
        (f"return:nvmlDeviceGetHandleByIndex_v2 3 {GPU_LOST}",),
        {
            "GPUs": ("failure", "7, the profile promises 8"),
            "GPU 3": ("failure", "does not answer: GPU is lost"),
        },
    ),
    "one off the bus while it is asked": (
        (f"return:nvmlDeviceGetMemoryInfo 0 {GPU_LOST}",),
        {
            "GPUs": ("failure", "7, the profile promises 8"),
            "GPU 0": ("failure", "does not answer: GPU is lost"),
        },
    ),
    "a library of another driver": (
        (f"return:nvmlInitWithFlags * {MISMATCH}",),
        {
            "GPUs": (
                "failure",
                "0, the profile promises 8 (RM has detected an NVML/RM version mismatch.)",
            )
        },
    ),
    "no driver": (
        (f"return:nvmlInitWithFlags * {NOT_LOADED}",),
        {"GPUs": ("failure", "0, the profile promises 8 (Driver Not Loaded)")},
    ),
    "a driver that says nothing": (
        (f"return:nvmlDeviceGetCount_v2 * {UNKNOWN}", f"return:nvmlShutdown * {UNKNOWN}"),
        {"GPUs": ("failure", "0, the profile promises 8 (Unknown Error)")},
    ),
    "no permission": (
        (f"return:nvmlInitWithFlags * {NO_PERMISSION}",),
        {"GPUs": ("failure", "0, the profile promises 8 (Insufficient Permissions)")},
    ),
}
"""Cause -> (what the library answers, checks that are not ok)."""
WITHOUT_PROMISE: dict[str, tuple[str, str]] = {
    "no driver": ("ok", "none, ranks run on the CPU (Driver Not Loaded)"),
    "none": ("ok", "none, ranks run on the CPU (the driver sees no GPU)"),
    "a library of another driver": (
        "warning",
        "none can be used: RM has detected an NVML/RM version mismatch.",
    ),
    "a driver that says nothing": ("warning", "none can be used: Unknown Error"),
}
"""The same where nobody promised GPUs."""

Checks = list[dict[str, str]]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(tmp_path_factory.mktemp("nvml"))


def run(environment: dict[str, str], *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        env={**os.environ, **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def judged(stub: Stub) -> dict[tuple[str, int], Checks]:
    """What the doctor finds in each case, with GPUs promised and without; one process for all."""
    cases = [*((cause, 8) for cause in CASES), *((cause, 0) for cause in WITHOUT_PROMISE)]
    wanted = [(promised, CASES[cause][0]) for cause, promised in cases]
    done = run(stub.environment(), "-c", JUDGE, stdin=json.dumps(wanted))
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("cause", CASES)
def test_what_nvml_says_is_told(cause: str, judged: dict[tuple[str, int], Checks]) -> None:
    found = {each["name"]: each for each in judged[cause, 8]}
    wrong = {name: (each["level"], each["found"]) for name, each in found.items() if each["level"] != "ok"}
    assert wrong == CASES[cause][1]
    assert all(found[name]["hint"] for name in wrong), "with what to do about it"


@pytest.mark.parametrize("cause", WITHOUT_PROMISE)
def test_a_broken_driver_is_no_machine_without(cause: str, judged: dict[tuple[str, int], Checks]) -> None:
    [gpus] = judged[cause, 0]
    assert (gpus["level"], gpus["found"]) == WITHOUT_PROMISE[cause]


def test_all_that_nvml_tells(stub: Stub) -> None:
    answers = (
        "count * 2",
        "ecc 1 2",
        "remap_pending 1 1",
        "clocks 1 0xc5",
        "processes 1 1",
        "links_down 1 3",
    )
    code = "import json, dataclasses; from llmtrain.probe.gpus import *; found = probe_gpus(); "
    code += "print(json.dumps(dataclasses.asdict(found)))"
    done = run(
        stub.environment(*answers, f"return:nvmlDeviceGetPersistenceMode 1 {NOT_SUPPORTED}"), "-c", code
    )
    found = json.loads(done.stdout)
    assert (found["driver"], found["reason"], found["silent"], len(found["gpus"])) == ("580.65.06", "", [], 2)
    assert found["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-stub-1",
        "memory_total": 85520809984,
        "memory_used": 500000000,
        "uncorrected_ecc_errors": 2,
        "row_remap_pending": True,
        "row_remap_failed": False,
        "throttle": ["too hot (hardware)", "power brake"],
        "persistence": None,
        "nvlinks_up": 15,
        "nvlinks_down": 3,
        "processes": [4711],
    }


def test_without_the_library() -> None:
    done = run({"LD_LIBRARY_PATH": ""}, "-c", "from llmtrain.probe.gpus import *; print(probe_gpus())")
    assert "NVML Shared Library Not Found" in done.stdout or "gpus=(Gpu(" in done.stdout


def test_the_command(stub: Stub, tmp_path: Path) -> None:
    """A GPU is lost, and the kernel's log says why: `llmtrain doctor` as a person types it."""
    dmesg = tmp_path / "bin" / "dmesg"
    dmesg.parent.mkdir()
    dmesg.write_text(
        "#!/bin/sh\necho '[ 9.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.'\n"
    )
    dmesg.chmod(0o755)
    answers = (f"return:nvmlDeviceGetHandleByIndex_v2 1 {GPU_LOST}", "count * 2", "ecc 0 4")
    environment = stub.environment(*answers, name="two") | {"PATH": f"{dmesg.parent}:{os.environ['PATH']}"}
    done = run(environment, "-m", "llmtrain", "doctor", "--runs", str(tmp_path / "runs"))
    assert done.returncode == 1, done.stderr
    assert "a run would not work here" in done.stdout
    for text in (
        "does not answer: GPU is lost",
        "4 uncorrected memory errors",
        "79 on 0000:3b:00: the GPU has fallen off the bus",
        "580.65.06",
    ):
        assert text in done.stdout, done.stdout
    for hint in (
        "GPU 1: reset it or reboot the node",
        "GPU 0: reset this GPU",
        "GPU error (Xid): reset the GPU",
    ):
        assert hint in done.stderr, done.stderr
