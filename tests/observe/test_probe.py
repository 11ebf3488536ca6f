"""Facts of hardware that this machine may lack: NVML's answers, the kernel's log, sysfs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from llmtrain.probe.gpus import probe_gpu, xids_in
from llmtrain.probe.links import probe_infiniband

LOG = """\
[    1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06
[12345.6] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[12350.0] NVRM: Xid (0000:86:00): 31
"""


class NvmlError(Exception):
    pass


class Nvml:
    """Answers as nvidia-ml-py gives them; `without`: functions that the GPU does not support."""

    NVMLError = NvmlError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1

    def __init__(self, *without: str) -> None:
        self._without = without

    def __getattr__(self, name: str) -> object:
        answers = {
            "HandleByIndex": "handle",
            "MemoryInfo": SimpleNamespace(total=80, used=7),
            "TotalEccErrors": 2,
            "RemappedRows": (1, 0, 1, 0),
            "CurrentClocksThrottleReasons": 0x1 | 0x4 | 0x40 | 0x80,
            "PersistenceMode": 1,
            "ComputeRunningProcesses": [SimpleNamespace(pid=4711)],
            "Name": b"NVIDIA H100",
            "UUID": "GPU-1",
        }

        def answer(handle: object, *rest: int) -> object:
            if name in self._without:
                raise NvmlError("Not Supported")
            if name == "nvmlDeviceGetNvLinkState":
                if rest[0] >= 4:
                    raise NvmlError("Invalid Argument")
                return int(rest[0] != 2)
            return answers[name.removeprefix("nvmlDeviceGet")]

        return answer


def test_all_that_nvml_tells() -> None:
    gpu = probe_gpu(Nvml(), 3)
    assert (gpu.index, gpu.name, gpu.uuid, gpu.memory_total, gpu.memory_used) == (
        3,
        "NVIDIA H100",
        "GPU-1",
        80,
        7,
    )
    assert (gpu.uncorrected_ecc_errors, gpu.row_remap_pending, gpu.row_remap_failed) == (2, True, False)
    assert gpu.throttle == ("too hot (hardware)", "power brake")
    assert (gpu.persistence, gpu.processes) == (True, (4711,))
    assert (gpu.nvlinks_up, gpu.nvlinks_down) == (3, 1)


def test_what_a_gpu_does_not_support_stays_unknown() -> None:
    names = ("TotalEccErrors", "RemappedRows", "CurrentClocksThrottleReasons", "PersistenceMode")
    missing = (*names, "ComputeRunningProcesses", "NvLinkState")
    gpu = probe_gpu(Nvml(*(f"nvmlDeviceGet{name}" for name in missing)), 0)
    assert (gpu.uncorrected_ecc_errors, gpu.row_remap_pending, gpu.persistence) == (None, None, None)
    assert (gpu.throttle, gpu.processes, gpu.nvlinks_up, gpu.nvlinks_down) == ((), (), 0, 0)


def test_errors_in_the_kernels_log() -> None:
    first, second = xids_in(LOG)
    assert (first.code, first.device) == (79, "0000:3b:00") and "fallen off the bus" in first.text
    assert (second.code, second.device, second.text) == (31, "0000:86:00", "")
    assert xids_in("nothing here") == ()


def test_infiniband_ports(tmp_path: Path) -> None:
    for adapter, state, physical in (
        ("mlx5_0", "4: ACTIVE", "5: LinkUp"),
        ("mlx5_1", "1: DOWN", "2: Polling"),
    ):
        port = tmp_path / adapter / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "phys_state").write_text(f"{physical}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    up, down = probe_infiniband(tmp_path)
    assert (up.name, up.state, up.physical, up.rate) == (
        "mlx5_0/1",
        "ACTIVE",
        "LinkUp",
        "400 Gb/sec (4X NDR)",
    )
    assert (down.name, down.state, down.physical) == ("mlx5_1/1", "DOWN", "Polling")
    assert probe_infiniband(tmp_path / "none") == ()
