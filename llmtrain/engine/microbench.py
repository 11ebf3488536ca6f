"""Measure this machine's rates: `python -m llmtrain.engine.microbench` prints them as JSON.

One process on one thread (CPU) or one GPU: matrix products, streaming passes, the cost of a small operation,
fused attention. Each figure is the best of several repetitions, so that other work disturbs little.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.config.model import ModelConfig, RopeConfig
from llmtrain.engine.model.block import Block
from llmtrain.engine.model.parameters import ModelParameter
from llmtrain.engine.model.rope import rotary_table
from llmtrain.engine.parallel.collectives import TensorParallel
from llmtrain.engine.parallel.groups import Group
from llmtrain.plan.calibrate import CPU_ATTENTION, CPU_PRODUCT

_BLOCK_OPERATIONS = 113
"""Operations of a block of the Llama kind that compute something, forward and backward."""
_BLOCK = ModelConfig(
    kind="llama",
    norm="rmsnorm",
    activation="swiglu",
    layers=1,
    hidden=64,
    ffn_hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    vocab=64,
    sequence=8,
)


def measure(device: torch.device, *, repetitions: int = 7) -> dict[str, float]:
    """Rates of one device in SI units: `gemm_flops`, `attention_flops`, `stream_bandwidth`,
    `small_op_seconds`.
    """
    is_cpu = device.type == "cpu"
    rows, width, inner = CPU_PRODUCT if is_cpu else (8192, 8192, 8192)
    left = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
    right = torch.randn(inner, width, dtype=torch.bfloat16, device=device)
    product = best_time(lambda: left @ right, device, repetitions)
    numbers = torch.zeros((1 << 22) if is_cpu else (1 << 28), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(numbers)
    stream = best_time(lambda: torch.add(numbers, 1.0, out=target), device, repetitions)
    return {
        "gemm_flops": 2.0 * rows * width * inner / product,
        "attention_flops": (_cpu_attention if is_cpu else _gpu_attention)(device, repetitions),
        "stream_bandwidth": 2.0 * numbers.numel() * 2 / stream,
        "small_op_seconds": (_small_cpu_operation if is_cpu else _small_gpu_operation)(device, repetitions),
    }


def _gpu_attention(device: torch.device, repetitions: int) -> float:
    """FLOP/s of the forward pass."""
    heads, rows, width = 32, 4096, 128
    query = torch.randn(1, heads, rows, width, dtype=torch.bfloat16, device=device)
    seconds = best_time(
        lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True), device, repetitions
    )
    return 2.0 * heads * rows * rows * width / seconds


def _cpu_attention(device: torch.device, repetitions: int) -> float:
    """FLOP/s of the forward and the backward pass, which has 2.5 times as many, over all lengths together."""
    heads, width, lengths = CPU_ATTENTION
    flops = seconds = 0.0
    for rows in lengths:
        shape = (1, heads, rows, width)
        query, key, value = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        gradient = torch.randn(shape, dtype=torch.bfloat16)

        def both(
            query: Tensor = query, key: Tensor = key, value: Tensor = value, gradient: Tensor = gradient
        ) -> None:
            F.scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

        flops += 7.0 * heads * rows * rows * width
        seconds += best_time(both, device, 4 * repetitions)
    return flops / seconds


def _small_gpu_operation(device: torch.device, repetitions: int) -> float:
    """Seconds of one that has next to nothing to do."""
    small, calls = torch.zeros(64, device=device), 200

    def many() -> None:
        for _ in range(calls):
            small.add_(1.0)

    return best_time(many, device, repetitions) / calls


def _small_cpu_operation(device: torch.device, repetitions: int) -> float:
    """The same with all that comes with it in training: a block that has nothing to compute."""
    block = Block(_BLOCK, 0, TensorParallel(Group("tp", (0,), 0, None), False), "none")
    for parameter in block.parameters():
        assert isinstance(parameter, ModelParameter)
        parameter.data = torch.full(parameter.spec.shape, 0.1, dtype=torch.bfloat16)
    table = rotary_table(RopeConfig(), int(_BLOCK.head_dim or 0), _BLOCK.sequence, device)
    inputs = torch.randn(_BLOCK.sequence, 1, _BLOCK.hidden, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(inputs)
    return (
        best_time(lambda: block(inputs, table).backward(gradient), device, 8 * repetitions)
        / _BLOCK_OPERATIONS
    )


def best_time(work: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Shortest time of some repetitions, after two to warm up; on CPUs this thread's own, whatever else the
    machine does."""
    best, clock = float("inf"), time.perf_counter if device.type == "cuda" else time.thread_time
    for index in range(repetitions + 2):
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= 2:
            best = min(best, clock() - start)
    return best


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    found = {**measure(device), "cores": float(len(os.sched_getaffinity(0)))}
    json.dump({"device": device.type, "torch": torch.__version__, **found}, sys.stdout)


if __name__ == "__main__":
    main()
