"""One node's part in the doctor's test of nodes and links: `python -m llmtrain.engine.linktest`.

Spoken to in JSON lines: a request on standard input, its answer on standard output.

    {"do": "product", "seconds": 1}   {"device": "cpu", "flops": [4e10]}, one figure a GPU
    {"do": "listen"}                  {"port": 41123}: where the other of a pair finds this node
    {"do": "reduce", "rank": 0, "address": "10.0.0.1", "port": 41123, "bytes": 16777216, "seconds": 1}
                                      {"bandwidth": 1.1e9, "latency": 2e-4}

`bandwidth`: bytes of the tensor that two nodes sum, over the time that it takes; `latency`: seconds for one
number. What fails is answered by {"error": "..."}. End of file ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT = timedelta(seconds=10)
MOST_REPEATS, LATENCY_REPEATS = 20, 10


class LinkTest:
    """Answers requests; keeps the store that it listens with until the pair is done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._count = device, 0
        self._store: TCPStore | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request; never raises."""
        known: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "product": self._product,
            "listen": self._listen,
            "reduce": self._reduce,
        }
        try:
            return known[request["do"]](request)
        except Exception as error:
            lines = str(error).strip().splitlines()
            return {"error": lines[0] if lines else type(error).__name__}

    def _product(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Rate of matrix products, sustained over the time, for each GPU in turn, or for one thread."""
        is_cpu = self._device.type == "cpu"
        count = 1 if is_cpu else torch.cuda.device_count()
        devices = [self._device] if is_cpu else [torch.device("cuda", index) for index in range(count)]
        rates = [sustained_flops(device, float(request["seconds"]) / count) for device in devices]
        return {"device": self._device.type, "flops": rates}

    def _listen(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._store = TCPStore(
            "0.0.0.0",  # the other of the pair comes from another node
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
        )
        return {"port": self._store.port}

    def _reduce(self, request: Mapping[str, Any]) -> dict[str, Any]:
        rank = int(request["rank"])
        store = self._store if rank == 0 else None
        if store is None:
            address, port = str(request["address"]), int(request["port"])
            store = TCPStore(address, port, is_master=False, timeout=TIMEOUT)
        backend = "gloo" if self._device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=TIMEOUT)
        try:
            return self._measure(int(request["bytes"]), float(request["seconds"]))
        finally:
            dist.destroy_process_group()
            self._store = None

    def _measure(self, size: int, seconds: float) -> dict[str, Any]:
        data = torch.zeros(size // 4, device=self._device)
        number = torch.zeros(1, device=self._device)
        latency = min(self._timed(number) for _ in range(LATENCY_REPEATS))
        # Both nodes have to agree on how often; the slower one's time counts.
        first = torch.tensor([self._timed(data)], device=self._device)
        dist.all_reduce(first, dist.ReduceOp.MAX)
        repeats = max(1, min(MOST_REPEATS, int(seconds / float(first.item()))))
        best = min(self._timed(data) for _ in range(repeats))
        return {"bandwidth": size / best, "latency": latency}

    def _timed(self, tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter() - began


def sustained_flops(device: torch.device, seconds: float) -> float:
    """FLOP/s over the whole time and not the best moment: a throttled device has good moments."""
    size = 256 if device.type == "cpu" else 8192
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left = torch.randn(size, size, dtype=dtype, device=device)
    done, began = 0, 0.0
    while True:
        for _ in range(8):
            left @ left
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if not began:  # the first ones warm up
            began = time.perf_counter()
            continue
        done += 8
        took = time.perf_counter() - began
        if took >= seconds:
            return 2.0 * size**3 * done / took


def main() -> None:
    """Answer requests until the end of file."""
    torch.set_num_threads(1)
    # Whatever libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    test = LinkTest(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(test.answer(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
