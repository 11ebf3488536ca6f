"""Every difference between devices: CPU with gloo, CUDA with NCCL. No other file asks which device it runs
on."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A last resort against a peer that hangs; the supervisor's heartbeats notice much earlier."""


Stamp = Any
"""A point on a device's time line: seconds of a host clock, or an event in a CUDA stream."""


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device."""

    torch_device: torch.device
    backend: str
    """Name of the collective backend."""

    @property
    def is_cuda(self) -> bool:
        """Whether this is a CUDA GPU."""
        return self.torch_device.type == "cuda"

    @property
    def is_host_memory(self) -> bool:
        """Whether tensors lie in host memory, where ranks of one host can share them."""
        return not self.is_cuda

    @property
    def fused_adamw(self) -> bool:
        """Whether torch has a fused AdamW for this device."""
        return self.torch_device.type in ("cpu", "cuda")

    @property
    def bucket_bytes(self) -> int:
        """FP32 bytes of a gradient bucket: large enough for full link speed, small enough to overlap."""
        return (256 if self.is_cuda else 16) << 20

    def synchronize(self) -> None:
        """Wait for all queued kernels; nothing to wait for on a CPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def stamp(self) -> Stamp:
        """Mark this point: now on a CPU; on CUDA where the current stream will be then, without waiting."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def seconds(self, start: Stamp, stop: Stamp) -> float:
        """Seconds between two marks; on CUDA both must have been passed (`synchronize`)."""
        if not self.is_cuda:
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1000.0

    def peak_memory(self) -> int:
        """Peak bytes that torch's allocator reserved (CUDA), or resident bytes of the process (CPU)."""
        if self.is_cuda:
            return torch.cuda.max_memory_reserved(self.torch_device)
        return resident_bytes()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a host tensor to the device; asynchronous from pinned memory on CUDA."""
        if self.is_cuda:
            return tensor.pin_memory().to(self.torch_device, non_blocking=True)
        return tensor


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def choose_device(local_rank: int, accelerator: str) -> Device:
    """Return the rank's device: the GPU of its local rank unless the profile's accelerator is `cpu` or
    there is none."""
    if accelerator != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return Device(device, "nccl")
    return Device(torch.device("cpu"), "gloo")


def prepare_numerics(device: Device, mode: str) -> None:
    """Make kernels deterministic and choose matrix precision. `mode` is the recipe's precision mode."""
    # cuBLAS needs a fixed workspace to be deterministic; it reads this at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=device.is_cuda)
    # Filling fresh memory costs a pass over every output, and no code here reads memory that it did not
    # write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    torch.backends.cudnn.allow_tf32 = mode == "tf32"


def init_process_group(device: Device, rank: int, world_size: int, init_method: str = "env://") -> None:
    """Join the ranks of this attempt; raises torch's DistError or RuntimeError when a peer does not come."""
    dist.init_process_group(
        device.backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device.torch_device if device.is_cuda else None,
    )
