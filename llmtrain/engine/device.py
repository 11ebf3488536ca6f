"""Every difference between devices: CPU with gloo, CUDA with NCCL. No other file asks which device it runs
on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import nn

from llmtrain.errors import ConfigError, Problem
from llmtrain.plan.memory.bucket_packing import default_bucket_bytes

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A last resort against a peer that hangs; the supervisor's heartbeats notice much earlier."""


MOST_GRAPHS = 64
"""Variants of a layer that torch may compile."""

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
    def has_tf32(self) -> bool:
        """Whether matrix products can run in TF32: on NVIDIA GPUs from Ampere on."""
        return self.is_cuda and torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

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
        """FP32 bytes of a gradient bucket."""
        return default_bucket_bytes(on_cpu=not self.is_cuda)

    def synchronize(self) -> None:
        """Wait for all queued kernels, but not for collectives that nothing has waited for yet (new weights
        on their way); nothing to wait for on a CPU."""
        if self.is_cuda:
            torch.cuda.current_stream(self.torch_device).synchronize()

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

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor from which a copy to the device runs beside everything else; nothing to do on a
        CPU."""
        return tensor.pin_memory() if self.is_cuda else tensor

    def peak_memory_in_use(self) -> int:
        """Peak bytes of live tensors (CUDA) or of the process (CPU) since `forget_peak_memory`."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch_device)
        return _status_bytes("VmHWM")

    def forget_peak_memory(self) -> None:
        """Begin a new peak at what is in use now."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            return
        with suppress(OSError):  # The kernel may not let a process do it; the peak is then that of its life.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def memory_capacity(self, ranks_on_host: int) -> int:
        """Bytes that this rank may use: its GPU's, or an equal share of the host's memory."""
        if self.is_cuda:
            return int(torch.cuda.mem_get_info(self.torch_device)[1])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, ranks_on_host)

    def allocation_retries(self) -> int:
        """How often the allocator had to empty its cache and try again; a CPU's never does."""
        if self.is_cuda:
            return int(torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0))
        return 0

    def release_cached_memory(self) -> None:
        """Give unused memory that the allocator keeps back to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a host tensor to the device; asynchronous from pinned memory on CUDA."""
        if not self.is_cuda:
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def compile_modules(self, modules: Iterable[nn.Module]) -> None:
        """Let torch compile each module at its first call. Raises ConfigError without a C++ compiler."""
        if self.torch_device.type == "meta":
            return
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise ConfigError(
                [
                    Problem(
                        "train.compile",
                        f"torch.compile needs a C++ compiler, and {compiler} is not on this node",
                        "install one, set CXX, or set train.compile to false",
                    )
                ]
            )
        # One graph for each micro-batch, format and mode: past the limit torch goes on without compiling.
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        for module in modules:
            # Shapes change with the micro-batch only: few, and each for long. Hooks stay outside: what they
            # note changes from call to call, and each time would be compiled anew.
            module.forward = torch.compile(module.forward, dynamic=False)

    def use_in_thread(self) -> None:
        """Make it the calling thread's device: CUDA's choice is per thread, and another one's costs its
        memory."""
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)


def fuses_grouped_heads(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a fused attention kernel takes fewer key than query heads: of CUDA's only the flash kernel
    does, which has no masks and no FP32; what no kernel takes is computed with all scores in memory."""
    return not query.is_cuda or (mask is None and query.dtype != torch.float32)


def _status_bytes(name: str) -> int:
    """A figure of /proc/self/status, which tells kibibytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()


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
    if device.is_cuda:
        # Attention by the fused kernels that are deterministic on demand; cuDNN's is not.
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        torch.backends.cuda.enable_cudnn_sdp(False)


def init_process_group(
    device: Device, rank: int, world_size: int, patience: timedelta = COLLECTIVE_TIMEOUT
) -> None:
    """Join the ranks of this attempt; raises torch's DistError or RuntimeError when a peer does not come.
    `patience` is the watchdog's limit for every collective."""
    dist.init_process_group(
        device.backend,
        init_method="env://",
        rank=rank,
        world_size=world_size,
        timeout=patience,
        device_id=device.torch_device if device.is_cuda else None,
    )
