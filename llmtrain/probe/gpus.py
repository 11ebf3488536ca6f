"""GPUs by NVML, and what their driver wrote into the kernel's log. Degrades to a reason, never raises."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from llmtrain.probe.facts import Gpu, Gpus, Xid

THROTTLE_REASONS: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that mean a sick GPU; idleness (0x1), a chosen
clock (0x2, 0x100) and the power cap under load (0x4) do not."""
LOG_SECONDS = 3.0
MOST_XIDS = 20
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, *(.*))?")


def probe_gpus() -> Gpus:
    """All NVIDIA GPUs with their health counters, or the reason why none can be seen."""
    try:
        import pynvml
    except ImportError:
        return Gpus(reason="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Gpus(reason=str(error), is_broken=error.value not in absent)
    driver = ""
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return _all_gpus(pynvml, driver)
    except pynvml.NVMLError as error:
        return Gpus(driver=driver, reason=str(error), is_broken=True)
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _all_gpus(nvml: Any, driver: str) -> Gpus:
    """Those that answer, and those that do not: one that has fallen off the bus takes no other with it."""
    found, silent = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(probe_gpu(nvml, index))
        except nvml.NVMLError as error:
            silent.append(f"{index}: {error}")
    reason = "" if found else "the driver sees no GPU" if not silent else "none of them answers"
    return Gpus(driver=driver, gpus=tuple(found), reason=reason, silent=tuple(silent))


def probe_gpu(nvml: Any, index: int) -> Gpu:
    """One GPU; what it does not support stays unknown. Raises NVMLError when it does not answer at all."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    found: dict[str, Any] = {}
    with suppress(nvml.NVMLError):
        found["uncorrected_ecc_errors"] = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    with suppress(nvml.NVMLError):
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        found |= {"row_remap_pending": bool(pending), "row_remap_failed": bool(failed)}
    with suppress(nvml.NVMLError):
        bits = _clock_bits(nvml, handle)
        found["throttle"] = tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)
    with suppress(nvml.NVMLError):
        found["persistence"] = bool(nvml.nvmlDeviceGetPersistenceMode(handle))
    with suppress(nvml.NVMLError):
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found["processes"] = tuple(process.pid for process in running)
    states = list(_nvlink_states(nvml, handle))
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_total=memory.total,
        memory_used=memory.used,
        nvlinks_up=sum(states),
        nvlinks_down=len(states) - sum(states),
        **found,
    )


def _clock_bits(nvml: Any, handle: Any) -> int:
    """Why clocks are held down; drivers before 535 know the function by its old name only."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _nvlink_states(nvml: Any, handle: Any) -> Iterator[bool]:
    """Whether each NVLink of a GPU is up; nothing for links that it does not have."""
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED


def probe_xids() -> tuple[Xid, ...]:
    """Errors of the NVIDIA driver since boot, newest last; () when the log may not be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=LOG_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return xids_in(done.stdout.decode("utf-8", "replace"))


def xids_in(log: str) -> tuple[Xid, ...]:
    """`NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, ...` lines of a kernel log."""
    found = [Xid(code=int(code), device=device, text=text or "") for device, code, text in _XID.findall(log)]
    return tuple(found[-MOST_XIDS:])


def _text(value: Any) -> str:
    """pynvml gives bytes or text, depending on its version."""
    return value.decode() if isinstance(value, bytes) else str(value)
