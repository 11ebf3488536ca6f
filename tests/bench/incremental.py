"""How small incremental checkpoints are: changed bytes between real training states, at several distances.

    python -m tests.bench.incremental [--set KEY=VALUE ...] [--from 200] [--distances 1,10,50]

Trains the tiny recipe on the prepared standard library in one process. Prints JSON: stored bytes by part
(FP32 masters, moments, and BF16 weights, which no checkpoint holds), as a share of all bytes, and seconds per
gigabyte of packing and unpacking.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.corpus.preparation.prepare import prepare
from llmtrain.corpus.prepared import open_prepared
from llmtrain.engine.build import Parts, build_parts
from llmtrain.engine.device import choose_device
from llmtrain.engine.state import PARTS, state_pieces
from llmtrain.engine.step import Wishes, train_step
from llmtrain.run.checkpoints.delta import block_lengths, decode, encode

States = dict[str, torch.Tensor]


def main() -> None:
    """Train, keep states, and compare them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--from", dest="start", type=int, default=200)
    parser.add_argument("--distances", default="1,10,50")
    options = parser.parse_args()
    distances = [int(distance) for distance in options.distances.split(",")]
    settings = ["parallel.dp=1", "parallel.tp=1", "parallel.pp=1", *options.set]
    recipe = resolve("tiny", "local", settings).recipe
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(recipe.data, Path(folder) / "prepared")
        corpus = open_prepared(prepared.folder)
        layout = Layout(micro_batch=recipe.batch.global_size)
        parts = build_parts(
            recipe, layout, 0, choose_device(0, "cpu"), train=[corpus.train], validation=[corpus.validation]
        )
        parts.buckets.initialise(recipe.train.seed)
        result = compare(parts, options.start, distances)
    print(json.dumps({"parameters": state_of(parts)["master"].numel(), **result}, indent=2))


def compare(parts: Parts, start: int, distances: list[int]) -> dict[str, object]:
    """Ratios by distance and part."""
    old: States = {}
    found: dict[str, object] = {}
    for step in range(1, start + max(distances) + 1):
        train_step(parts, step, Wishes())
        if step == start:
            old = state_of(parts)
        if step - start in distances:
            found[f"{step - start} steps"] = ratios(old, state_of(parts))
    return found


def state_of(parts: Parts) -> States:
    """All masters, all moments, all BF16 weights, flat."""
    pieces = list(state_pieces(parts.buckets, parts.groups))
    state = {
        part: torch.cat([piece.data for piece in pieces if piece.key.endswith(f"/{part}")]) for part in PARTS
    }
    return {**state, "bf16 weights": state["master"].bfloat16()}


def ratios(old: States, new: States) -> dict[str, float]:
    """Stored share of every part, of what a checkpoint holds, and the time of packing and unpacking."""
    shares, stored_in_all, bytes_in_all, packing, unpacking = {}, 0, 0, 0.0, 0.0
    for part, tensor in new.items():
        after, before = (state.view(torch.uint8).numpy() for state in (tensor, old[part]))
        began = time.process_time()
        blocks = [bytes(block) for block in encode(after, before, tensor.element_size())]
        packed = time.process_time()
        again = before.copy()
        position = 0
        for block, length in zip(blocks, block_lengths(again.size), strict=True):
            decode(memoryview(block), length, again[position : position + length], tensor.element_size())
            position += length
        assert np.array_equal(again, after)
        stored = sum(map(len, blocks))
        shares[part] = round(stored / after.size, 3)
        if part in PARTS:
            stored_in_all, bytes_in_all = stored_in_all + stored, bytes_in_all + after.size
            packing, unpacking = packing + packed - began, unpacking + time.process_time() - packed
    gigabytes = bytes_in_all / 1e9
    return {
        **shares,
        "checkpoint": round(stored_in_all / bytes_in_all, 3),
        "CPU seconds a GB to pack": round(packing / gigabytes, 2),
        "CPU seconds a GB to unpack": round(unpacking / gigabytes, 2),
    }


if __name__ == "__main__":
    main()
