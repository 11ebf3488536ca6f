"""A committed checkpoint of two shards, made without torch."""

from __future__ import annotations

import json

import pytest

from llmtrain.run.checkpoints import CheckpointInfo, begin_save, commit_save
from llmtrain.run.checkpoints.checksum import Checksum


def write_shard(folder, rank, content=b"01234567"):
    """One shard whose data is a U8 tensor `t` of 16 elements, half on each rank."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + content
    name = f"shard-{rank:05d}"
    (folder / f"{name}.safetensors").write_bytes(data)
    checksum = Checksum()
    checksum.update(memoryview(data))
    piece = {"shard": rank, "bytes": [len(data) - 8, len(data)], "box": [[0], [16]], "flat": [8 * rank, 8]}
    sidecar = {
        "file": f"{name}.safetensors",
        "bytes": len(data),
        "checksum": checksum.text(),
        "tensors": {"t": {"dtype": "U8", "shape": [16], "pieces": [piece]}},
    }
    (folder / f"{name}.json").write_text(json.dumps(sidecar))


@pytest.fixture
def make_checkpoint(tmp_path):
    """A function that commits a checkpoint of a step below `tmp_path/checkpoints`."""

    def make(step, *, run_id="run-1", digest="recipe-1"):
        folder = begin_save(tmp_path / "checkpoints", step)
        for rank in range(2):
            write_shard(folder, rank)
        info = CheckpointInfo(run_id=run_id, recipe_digest=digest, step=step, consumed_samples=8 * step)
        return commit_save(folder, info, 2)[0]

    return make


@pytest.fixture
def make_chain(tmp_path):
    """A function that commits one full and some incremental checkpoints of a [1000] FP32 tensor."""

    def make(*steps):
        import torch

        from llmtrain.engine.checkpoint.pieces import ALONE, whole
        from llmtrain.engine.checkpoint.save import Previous, save_checkpoint

        previous, made = None, []
        for step in steps:
            info = CheckpointInfo(run_id="run-1", recipe_digest="", step=step, consumed_samples=8 * step)
            pieces = [whole("w", torch.arange(1000.0) + step)]
            saved = save_checkpoint(tmp_path / "checkpoints", info, pieces, ALONE, previous=previous)
            previous = Previous(saved.base, pieces)
            made.append(saved.checkpoint)
        return made

    return make
