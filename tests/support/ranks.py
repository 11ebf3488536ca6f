"""Runs a function in several gloo processes that meet through a file: no ports, no races."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = ["torch", "torch.distributed", "torch.distributed.pipelining", "llmtrain.engine.build"]
"""Imported once by the fork server; every rank starts with them in memory."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *arguments: Any,
    timeout: float = 400.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Call `function(rank, world_size, *arguments)` on every rank of a new world; return the results in
    rank order.

    Function and arguments must be importable and picklable. Raises AssertionError with the traceback of the
    first rank that failed, and kills the others; nothing is left running. A rank in `may_die` that dies has
    the result None.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
    ends: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(function, rank, world_size, str(rendezvous), sending, arguments),
            daemon=True,
        )
        process.start()
        sending.close()
        ends[receiving] = rank
        processes.append(process)
    try:
        return _collect(ends, world_size, time.monotonic() + timeout, may_die)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(
    ends: dict[Connection, int], world_size: int, deadline: float, may_die: tuple[int, ...]
) -> list[Any]:
    results: list[Any] = [None] * world_size
    while ends:
        ready = wait(list(ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(ends.values())} gave no result in time")
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.pop(end)
            try:
                is_good, value = end.recv()
            except EOFError:
                if rank in may_die:
                    continue
                raise AssertionError(f"rank {rank} died without a word") from None
            if not is_good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return results


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: str,
    sending: Connection,
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
            )
        sending.send((True, function(rank, world_size, *arguments)))
    except BaseException:
        sending.send((False, traceback.format_exc()))
    finally:
        sending.close()
