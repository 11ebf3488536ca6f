"""Save and load beside their floors: a raw write + fsync of the same bytes, and torch's distributed
checkpoint (DCP).

    python -m tests.bench.checkpoint_io [--parameters 201000000] [--rounds 5] [--folder DIR]

All variants run in turn in every round, so that a busy machine is unfair to none; the slowest rank counts.
`stall` is the whole copy into host memory, as if there were nothing to compute until the weights change;
`stall beside a step` is what a forward and backward pass of `STEP_SECONDS` takes longer because of it, the
writing that goes on in the thread included. Prints JSON: seconds (least, median, most) and the median of the
per-round ratios to the floor and to DCP.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from llmtrain.engine.checkpoint.background import BackgroundSaves
from llmtrain.engine.checkpoint.choose import choose_checkpoint
from llmtrain.engine.checkpoint.exchange import beside
from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import Piece, Ranks
from llmtrain.engine.checkpoint.save import Saved, save_checkpoint
from llmtrain.run.checkpoints import CheckpointInfo, newest_valid
from tests.support.ranks import run_ranks

WORLD = 2
TENSORS = 48
STEP_SECONDS = 0.5
"""Computing between the start of a save and the change of the weights: little for so many parameters."""


def main() -> None:
    """Run all rounds and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, default=201_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-io-", dir=options.folder))
    try:
        results = run_ranks(bench_rank, WORLD, folder, options.parameters, options.rounds, timeout=1200.0)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(summarise(results), indent=2))


def summarise(results: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Slowest rank of every variant and round; least, median, most; ratios within a round."""
    rounds = [
        {name: max(rank[number][name] for rank in results) for name in results[0][number]}
        for number in range(len(results[0]))
    ]
    seconds = {
        name: [round(pick(row[name] for row in rounds), 3) for pick in (min, statistics.median, max)]
        for name in rounds[0]
    }
    pairs = {
        "save / raw write": ("save", "raw write"),
        "save / dcp.save": ("save", "dcp.save"),
        "stall of a background save / dcp.save": ("stall", "dcp.save"),
        "stall beside a step / dcp.save": ("stall beside a step", "dcp.save"),
        "stall of a background save / stall of dcp.async_save": ("stall", "dcp.async_save stall"),
        "load / dcp.load": ("load", "dcp.load"),
        "load re-sharded / dcp.load": ("load re-sharded", "dcp.load"),
        "verify and load / dcp.load": ("verify and load", "dcp.load"),
    }
    ratios = {
        name: round(statistics.median(row[first] / row[second] for row in rounds), 2)
        for name, (first, second) in pairs.items()
    }
    return {
        "rounds": len(rounds),
        "seconds least, median, most": seconds,
        "ratios (median of rounds)": ratios,
    }


def bench_rank(rank: int, world_size: int, parameters: int, rounds: int) -> list[dict[str, float]]:
    """Seconds of every variant in every round, on this rank."""
    torch.set_num_threads(1)
    rows = parameters // TENSORS // 2048 // world_size * world_size
    own = rows // world_size
    local = {f"layers.{n}.w": torch.rand(own, 2048) for n in range(TENSORS)}
    zeros = {key: torch.zeros(own, 2048) for key in local}
    mesh = init_device_mesh("cpu", (world_size,))
    folders = [tempfile.mkdtemp(prefix="checkpoint-io-")] if rank == 0 else [""]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    ranks = Ranks(rank, world_size, lambda text: gathered(text, world_size))
    own_rows = [
        Piece(key, (rows, 2048), (rank * own, 0), (own, 2048), 0, tensor.view(-1))
        for key, tensor in local.items()
    ]
    saves = BackgroundSaves(folder / "background", own_rows, beside(ranks, "save"), writer="1", incremental=0)
    found: list[dict[str, float]] = []
    try:
        for number in range(rounds + 1):
            measured = one_round(folder / str(number), local, zeros, rows, ranks, mesh, saves)
            if number:  # the first one warms up
                found.append(measured)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder / str(number))
                shutil.rmtree(folder / "background")
            dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def one_round(
    folder: Path,
    local: dict[str, torch.Tensor],
    zeros: dict[str, torch.Tensor],
    rows: int,
    ranks: Ranks,
    mesh: Any,
    saves: BackgroundSaves,
) -> dict[str, float]:
    """Every variant once."""
    own, rank = rows // ranks.world_size, ranks.rank

    def pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
        return [
            Piece(key, (rows, 2048), (rank * own, 0), (own, 2048), 0, tensor.view(-1))
            for key, tensor in tensors.items()
        ]

    def columns() -> list[Piece]:
        width = 2048 // ranks.world_size
        return [
            Piece(key, (rows, 2048), (0, rank * width), (rows, width), 0, tensor.view(-1))
            for key, tensor in zeros.items()
        ]

    def distributed(tensors: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        return {key: DTensor.from_local(tensor, mesh, [Shard(0)]) for key, tensor in tensors.items()}

    folder.mkdir(exist_ok=True)
    info = CheckpointInfo(run_id="r", recipe_digest="", step=1, consumed_samples=0)
    measured = {
        "raw write": timed(lambda: raw_write(folder / f"raw-{rank}", local)),
        "save": timed(lambda: save_checkpoint(folder / "ours", info, pieces(local), ranks)),
        "dcp.save": timed(lambda: dcp.save(distributed(local), checkpoint_id=folder / "dcp")),
    }
    measured["stall"] = timed(
        lambda: (saves.start(info, lambda *_: None, own={}, incremental=False), saves.finish_copy())
    )
    assert isinstance(saves.wait(), Saved)
    measured["stall beside a step"] = beside_a_step(saves, replace(info, step=2))
    pending: list[Any] = []
    measured["dcp.async_save stall"] = timed(
        lambda: pending.append(dcp.async_save(distributed(local), checkpoint_id=folder / "dcp-async"))
    )
    pending[0].result()
    chosen = newest_valid(folder / "ours", checksums=False)
    assert chosen.checkpoint is not None
    path = chosen.checkpoint.path
    measured["verify"] = timed(lambda: choose_checkpoint(folder / "ours", ranks, run_id="r"))
    measured["load"] = timed(lambda: load_pieces(path, pieces(zeros)))
    assert all(torch.equal(zeros[key], local[key]) for key in local)
    measured["verify and load"] = measured["verify"] + measured["load"]
    measured["load re-sharded"] = timed(lambda: load_pieces(path, columns()))
    measured["dcp.load"] = timed(lambda: dcp.load(distributed(zeros), checkpoint_id=folder / "dcp"))
    assert all(torch.equal(zeros[key], local[key]) for key in local)
    return measured


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work` on this rank; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def beside_a_step(saves: BackgroundSaves, info: CheckpointInfo) -> float:
    """What a step takes longer because a save begins before it."""

    def step() -> None:
        saves.start(info, lambda *_: None, own={}, incremental=False)
        compute()
        saves.finish_copy()

    passes()
    alone = timed(compute)
    longer = timed(step)
    assert isinstance(saves.wait(), Saved)
    return max(0.0, longer - alone)


@cache
def passes() -> int:
    """Matrix products that fit into a step."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < STEP_SECONDS:
        product()
        count += 1
    return count


def compute() -> None:
    """A forward and backward pass: the same work in every call."""
    for _ in range(passes()):
        product()


def product() -> None:
    """A little work."""
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))


def raw_write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The floor: the same bytes into one file, made durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in tensors.values():
        content, done = tensor.view(-1).view(torch.uint8).numpy().data, 0
        while done < content.nbytes:
            done += os.write(descriptor, content[done : done + (8 << 20)])
    os.fsync(descriptor)
    os.close(descriptor)


def gathered(text: str, world_size: int) -> list[str]:
    """One text from every rank."""
    texts = [""] * world_size
    dist.all_gather_object(texts, text)
    return texts


if __name__ == "__main__":
    main()
