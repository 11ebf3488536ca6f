"""Collectives through shared memory: sums, order, several under way, a member that dies, nothing left
behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from llmtrain.engine.parallel.groups import Group, build_groups
from llmtrain.engine.parallel.shared_memory import (
    LARGEST_SLOT,
    PREFIX,
    open_shared_memory,
)
from llmtrain.parallel_dims import ParallelDims
from llmtrain.run.snapshots import SHARED_MEMORY, drop, make_private, snapshots_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine


def _group(rank: int, world_size: int, slot_bytes: int = 4096) -> Group:
    group = build_groups(ParallelDims(tp=world_size), rank).tp
    group.use_shared_memory(slot_bytes)
    return group


def same_as_gloo(rank: int, world_size: int) -> bool:
    """Every collective gives gloo's numbers, for small tensors (shared memory) and large ones (gloo)."""
    group = _group(rank, world_size)
    assert group._local is not None
    plain = build_groups(ParallelDims(tp=world_size), rank).tp
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
        for rows in (1, 3, 500):
            tensor = torch.randint(-8, 9, (rows * world_size, 2), generator=generator).to(dtype)
            assert torch.equal(group.all_reduce(tensor.clone()), plain.all_reduce(tensor.clone()))
            assert torch.equal(group.all_gather(tensor), plain.all_gather(tensor))
            assert torch.equal(group.reduce_scatter(tensor), plain.reduce_scatter(tensor))
    return True


def many_under_way(rank: int, world_size: int) -> list[float]:
    """Operations are started before earlier ones are waited for, and waited for out of order, by members
    that race."""
    group = _group(rank, world_size)
    sums = []
    for round_number in range(300):
        tensors = [torch.full((5,), float(rank + 10 * turn + round_number)) for turn in range(4)]
        pending = [group.start_all_reduce(tensor) for tensor in tensors]
        for wait in reversed(pending) if (rank + round_number) % 2 else pending:
            wait.wait()
        sums.append(sum(float(tensor.sum()) for tensor in tensors))
    return sums


def survive_a_death(rank: int, world_size: int) -> str:
    """The last member is killed; the others are told, not left waiting."""
    group = _group(rank, world_size)
    group.all_reduce(torch.ones(3))
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            group.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return "nothing noticed"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_numbers_are_gloos(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(same_as_gloo, world_size, tmp_path) == [True] * world_size
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}*"))


def test_many_under_way(tmp_path: Path) -> None:
    results = run_ranks(many_under_way, 3, tmp_path)
    expected = [sum(5.0 * (3 + 30 * turn + 3 * number) for turn in range(4)) for number in range(300)]
    assert results == [expected] * 3


def test_a_death_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 2 died without a word"):
        run_ranks(survive_a_death, 3, tmp_path)
    results = run_ranks(survive_a_death, 3, tmp_path, may_die=(2,))
    assert all("connection lost" in str(result) for result in results[:2])


def test_too_much_is_left_to_gloo() -> None:
    assert open_shared_memory(0, 2, LARGEST_SLOT + 1, lambda text: [text, text]) is None
    assert open_shared_memory(0, 17, 64, lambda text: [text] * 17) is None


def test_a_member_on_another_host_sends_all_to_gloo() -> None:
    answers = iter([["/dev/shm/llmtrain-of-another-host", ""], ["no", "yes"]])
    assert open_shared_memory(1, 2, 64, lambda text: next(answers)) is None


def test_what_a_killed_group_left_is_removed(tmp_path: Path) -> None:
    """And nothing else: a restart opens new groups long after the node's snapshots were taken."""
    old, young = (SHARED_MEMORY / f"{PREFIX}left-by-test-{os.getpid()}-{age}" for age in ("old", "young"))
    snapshots = snapshots_of(tmp_path, "node")
    make_private(snapshots)
    try:
        for folder in (old, young, snapshots / "step-00000001.1"):
            folder.mkdir()
        for folder in (old, snapshots, *snapshots.parents[:2]):
            os.utime(folder, (1, 1))
        assert open_shared_memory(0, 1, 4096, lambda text: [text]) is not None
        assert not old.exists()
        assert young.exists()
        assert list(snapshots.iterdir())
    finally:
        drop(snapshots)
        for folder in (old, young):
            if folder.exists():
                folder.rmdir()
