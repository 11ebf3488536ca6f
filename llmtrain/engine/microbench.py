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


def measure(device: torch.device, *, repetitions: int = 7) -> dict[str, float]:
    """Rates of one device in SI units: `gemm_flops`, `attention_flops`, `stream_bandwidth`,
    `small_op_seconds`.
    """
    is_cpu = device.type == "cpu"
    size, tokens = (512, 1024) if is_cpu else (8192, 8192)
    left = torch.randn(tokens, size, dtype=torch.bfloat16, device=device)
    right = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product = best_time(lambda: left @ right, device, repetitions)
    numbers = torch.zeros((1 << 22) if is_cpu else (1 << 28), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(numbers)
    stream = best_time(lambda: torch.add(numbers, 1.0, out=target), device, repetitions)
    small = torch.zeros(64, device=device)
    calls = 200

    def many() -> None:
        for _ in range(calls):
            small.add_(1.0)

    rows, heads, width = (256, 4, 32) if is_cpu else (4096, 32, 128)
    query = torch.randn(1, heads, rows, width, dtype=torch.bfloat16, device=device)
    attention = best_time(
        lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True), device, repetitions
    )
    return {
        "gemm_flops": 2.0 * tokens * size * size / product,
        "attention_flops": 2.0 * heads * rows * rows * width / attention,
        "stream_bandwidth": 2.0 * numbers.numel() * 2 / stream,
        "small_op_seconds": best_time(many, device, repetitions) / calls,
    }


def best_time(work: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Shortest time of some repetitions, after two to warm up."""
    best = float("inf")
    for index in range(repetitions + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index >= 2:
            best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    found = {**measure(device), "cores": float(len(os.sched_getaffinity(0)))}
    json.dump({"device": device.type, "torch": torch.__version__, **found}, sys.stdout)


if __name__ == "__main__":
    main()
