"""Facts of hardware that this machine may lack: the kernel's log, sysfs; NVML is in `test_nvml.py`."""

from __future__ import annotations

from pathlib import Path

from llmtrain.probe.gpus import xids_in
from llmtrain.probe.links import probe_infiniband

LOG = """\
[    1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06
[12345.6] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[12350.0] NVRM: Xid (0000:86:00): 31
"""


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
