"""SIGKILL inside save, commit and prune: whatever is left on the disk loads, and is a state that really
was."""

from __future__ import annotations

import random

import pytest
import torch

from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import ALONE, whole
from llmtrain.engine.checkpoint.save import Previous, owned_pieces, save_checkpoint
from llmtrain.run.checkpoints import (
    CheckpointInfo,
    list_checkpoints,
    newest_valid,
    prune,
    verify,
)
from tests.support.kill_points import run_killed

pytestmark = pytest.mark.engine

STEPS = (10, 20, 30)
INCREMENTAL = (10, 20, 30, 40)
FULL = (10, 30)
"""The others of INCREMENTAL hold changed bytes only."""


@pytest.fixture(autouse=True)
def one_thread():
    """A forked child of a process with OpenMP threads could hang."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def state_of(step, size=50):
    return {"w": torch.arange(size).float() + step, "b": torch.full((3, 5), float(step)).bfloat16()}


def save_all(root, acknowledged, *, size=50, keep=1, steps=STEPS, full=STEPS):
    """What an engine does, again and again; each commit is noted outside before the prune."""
    previous = None
    for step in steps:
        info = CheckpointInfo(run_id="r", recipe_digest="d", step=step, consumed_samples=step)
        pieces = owned_pieces(whole(key, tensor) for key, tensor in state_of(step, size).items())
        saved = save_checkpoint(
            root, info, pieces, ALONE, writer="1", previous=None if step in full else previous
        )
        assert saved.is_full == (step in full)
        previous = Previous(saved.base, pieces)
        with acknowledged.open("ab", buffering=0) as stream:
            stream.write(f"{step}\n".encode())
        prune(root, keep)


def check(root, acknowledged, size=50):
    """The newest state loads bit for bit and is no older than the last acknowledged commit; none is half
    there."""
    done = [int(line) for line in acknowledged.read_text().split()] if acknowledged.exists() else []
    selection = newest_valid(root, run_id="r", recipe_digest="d")
    assert selection.skipped == (), "a killed save or deletion must not look like damage"
    for checkpoint in list_checkpoints(root):
        assert verify(checkpoint.path) == []
    if selection.checkpoint is None:
        assert not done
        return 0
    step = selection.checkpoint.step
    assert step >= max(done, default=0)
    found = {key: torch.zeros_like(tensor) for key, tensor in state_of(step, size).items()}
    load_pieces(selection.checkpoint.path, [whole(key, tensor) for key, tensor in found.items()])
    for key, tensor in state_of(step, size).items():
        assert torch.equal(found[key], tensor)
    return step


def test_killed_before_every_single_disk_operation(tmp_path):
    """Exhaustive: kill before operation 1, 2, 3, ... until the work finishes; then go on from what is
    left."""
    kill_everywhere(tmp_path, STEPS, full=STEPS, left=1, at_least=60)


def test_killed_before_every_single_disk_operation_of_a_chain(tmp_path):
    """The same with incremental checkpoints, whose bases must not go before them."""
    kill_everywhere(tmp_path, INCREMENTAL, full=FULL, left=2, at_least=100)


def kill_everywhere(tmp_path, steps, *, full, left, at_least):
    at, found = 0, []
    while True:
        at += 1
        assert at < 500
        root, acknowledged = tmp_path / str(at) / "checkpoints", tmp_path / str(at) / "acknowledged"
        root.parent.mkdir()

        def work(root=root, acknowledged=acknowledged):
            save_all(root, acknowledged, steps=steps, full=full)

        finished = run_killed(work, at=at)
        found.append(check(root, acknowledged))
        if finished:
            break
        if at % 7 == 0:
            assert run_killed(work)
            assert check(root, acknowledged) == steps[-1]
            # An incremental one of the killed save stays until a full one follows it.
            assert len(list_checkpoints(root)) in ((1,) if left == 1 else (left, 2 * left)), (
                "pruned, and leftovers of the killed one are gone"
            )
            assert not [path for path in root.iterdir() if path.name.endswith(".tmp")]
    assert at > at_least, "the number of operations killed at"
    assert found == sorted(found)
    assert set(found) == {0, *steps}


@pytest.mark.parametrize("seed", range(50))
def test_killed_at_a_random_moment(tmp_path, seed):
    """Inside writes, fsyncs, checksums and the packing of changed bytes too, with shards of some MB."""
    size = 1_000_000
    root, acknowledged = tmp_path / "checkpoints", tmp_path / "acknowledged"
    delay = random.Random(seed).uniform(0.001, 0.2)
    steps, full = (INCREMENTAL, FULL) if seed % 2 else (STEPS, STEPS)
    run_killed(lambda: save_all(root, acknowledged, size=size, keep=2, steps=steps, full=full), after=delay)
    check(root, acknowledged, size)
