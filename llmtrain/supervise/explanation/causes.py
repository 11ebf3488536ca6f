"""What kind of failure ended an attempt. Pure: from the first finding, the last lines and the kernel's word.

The classes are those that ask for different answers. Evidence from outside of the failing code weighs more
than its own words: a rank that the kernel killed for memory prints nothing, and NCCL and gloo blame peers.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.events.words import ErrorClass, FindingKind
from llmtrain.supervise.detection.detect import Finding, describe_exit
from llmtrain.supervise.detection.reports import RankEnd

CauseClass = Literal[
    "device_memory",
    "host_memory",
    "device",
    "communication",
    "storage",
    "numeric",
    "checkpoint",
    "data",
    "config",
    "user_code",
    "native_crash",
    "hang",
    "node",
    "launcher",
    "scheduler",
    "signal",
    "unknown",
]

CLASSES: dict[CauseClass, str] = {
    "device_memory": "the device's memory ran out",
    "host_memory": "the machine's memory ran out",
    "device": "a GPU failed",
    "communication": "ranks could not talk to each other",
    "storage": "storage refused or failed",
    "numeric": "numbers are not finite",
    "checkpoint": "no checkpoint can be restored",
    "data": "the corpus cannot be read",
    "config": "the configuration cannot be run",
    "user_code": "the code raised an error",
    "native_crash": "native code crashed",
    "hang": "ranks stood still",
    "node": "a node was lost",
    "launcher": "torchrun failed",
    "scheduler": "the scheduler ended it",
    "signal": "a process was killed by a signal",
    "unknown": "nobody knows why",
}
"""Class -> what it means."""

PATTERNS: tuple[tuple[CauseClass, str], ...] = (
    (
        "device_memory",
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|NCCL.*Cuda failure.*out of memory",
    ),
    (
        "host_memory",
        r"MemoryError|Cannot allocate memory|can't allocate memory|std::bad_alloc|oom-kill"
        r"|DefaultCPUAllocator: not enough memory|unable to mmap|Bus error.*shm|Out of memory: Killed",
    ),
    (
        "device",
        r"NVRM: Xid|uncorrectable ECC|device-side assert|illegal memory access|unspecified launch failure"
        r"|CUDA error: (?:an illegal|hardware|unknown|the launch timed)|CUBLAS_STATUS_EXECUTION_FAILED"
        r"|GPU has fallen off the bus|no CUDA-capable device|CUDA driver initialization failed"
        r"|NVLink.*error|CUDA error: all CUDA-capable devices are busy",
    ),
    (
        "storage",
        r"No space left on device|Read-only file system|Input/output error|Stale file handle"
        r"|Disk quota exceeded|Too many open files|OSError: \[Errno (?:5|28|30|116|122)\]"
        r"|SafetensorError|Transport endpoint is not connected",
    ),
    (
        "communication",
        r"NCCL (?:error|WARN.*(?:failed|timed out))|ncclInternalError|ncclSystemError|ncclRemoteError"
        r"|ncclUnhandledCudaError|Watchdog caught collective operation timeout|Gloo connectFullMesh"
        r"|gloo/transport|Connection (?:reset|closed|refused) by peer|Connection reset|Connection refused"
        r"|DistNetworkError|DistStoreError|DistBackendError|TCPStore|Broken pipe|Socket Timeout"
        r"|wait timeout after|NET/IB.*(?:error|failed)|No route to host",
    ),
    ("numeric", r"NumericError|not both finite|FloatingPointError|found inf|loss is nan"),
    (
        "scheduler",
        r"slurmstepd: error:.*(?:CANCELLED|DUE TO TIME LIMIT|DUE TO PREEMPTION|NODE FAIL)"
        r"|DUE TO TIME LIMIT|PREEMPTED",
    ),
    ("native_crash", r"Segmentation fault|Fatal Python error|core dumped|double free or corruption"),
    (
        "user_code",
        r"^(?:\w+\.)*(?:\w*Error|\w*Exception|AssertionError|KeyboardInterrupt)\b(?:: |$)"
        r"|Traceback \(most recent call last\)",
    ),
)
"""Class -> what its lines look like; the first that fits counts, most specific first."""
WORDS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in PATTERNS)

BY_ERROR_CLASS: dict[ErrorClass | Literal[""], CauseClass] = {
    "out_of_memory": "device_memory",
    "communication": "communication",
    "storage": "storage",
    "checkpoint": "checkpoint",
    "data": "data",
    "numeric": "numeric",
    "config": "config",
    "user_code": "user_code",
}
"""The engine's own word (`RankFailed.error_class`) -> class."""

BY_KIND: dict[FindingKind, CauseClass] = {
    "hang": "hang",
    "agent_lost": "node",
    "node_silent": "node",
    "node_unreachable": "node",
    "peer_unreachable": "communication",
    "start_timeout": "hang",
    "launcher_failed": "launcher",
}
"""Kind of finding -> class, when nothing more is known."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an attempt ended."""

    kind: CauseClass
    evidence: str = ""
    """The line, exit code or count that says so."""


def cause_of(
    finding: Finding,
    end: RankEnd | None,
    lines: Sequence[str],
    kernel: Sequence[str],
    oom_kills: int,
    *,
    on_gpu: bool,
    launcher_exit: int | None = None,
) -> Cause:
    """The class of the first failure. `end` and `lines` are the failing rank's; `kernel` and `oom_kills` its
    node's word since the ranks were started; `launcher_exit`: how a torchrun that failed itself has ended."""
    # What the tear-down killed says nothing of why.
    code = launcher_exit if end is None else None if end.killed else end.exit_code
    signalled = code if (code or 0) < 0 else None
    if found := _from_kernel(signalled, end, kernel, oom_kills):
        return found
    own = BY_ERROR_CLASS.get(finding.error_class)
    if own == "device_memory" and not on_gpu:
        own = "host_memory"
    if own is not None and own != "user_code":
        return Cause(kind=own, evidence=finding.message)
    if finding.kind in BY_KIND and finding.kind != "launcher_failed":
        return Cause(kind=BY_KIND[finding.kind], evidence=finding.message)
    if signalled is not None and end is not None:
        return _from_signal(signalled, lines)
    if found := cause_in_lines([*lines, finding.message]):
        return Cause(kind="host_memory", evidence=found.evidence) if _is_host(found, on_gpu) else found
    kind = own or BY_KIND.get(finding.kind, "unknown")
    return Cause(kind=kind, evidence=finding.message)


def cause_in_lines(lines: Sequence[str]) -> Cause | None:
    """The most specific class that any line shows, with that line."""
    for kind, pattern in WORDS:
        for line in reversed(lines):
            if pattern.search(line):
                return Cause(kind=kind, evidence=line.strip())
    return None


def _from_kernel(
    signalled: int | None, end: RankEnd | None, kernel: Sequence[str], oom_kills: int
) -> Cause | None:
    killed = signalled == -signal.SIGKILL
    for line in reversed(kernel):
        if killed and re.search(r"oom|out of memory|Killed process", line, re.IGNORECASE):
            return Cause(kind="host_memory", evidence=line)
        if "NVRM: Xid" in line and end is not None:
            return Cause(kind="device", evidence=line)
    if killed and oom_kills:
        return Cause(kind="host_memory", evidence=f"the control group counts {oom_kills} kills for memory")
    return None


def _from_signal(code: int, lines: Sequence[str]) -> Cause:
    said = cause_in_lines(lines)
    if -code in CRASHES:
        specific = said is not None and said.kind in (
            "device",
            "device_memory",
            "host_memory",
            "communication",
        )
        if said is not None and specific:
            return said
        return Cause(kind="native_crash", evidence=describe_exit(code))
    if said is not None and said.kind == "scheduler":
        return said
    return Cause(kind="signal", evidence=describe_exit(code))


def _is_host(found: Cause, on_gpu: bool) -> bool:
    return found.kind == "device_memory" and not on_gpu
