"""Which snapshot in the nodes' memory the next attempt goes on from: real agents' answers, no ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.backends.base import Node
from llmtrain.backends.local import LocalBackend
from llmtrain.config.checkpoint import CheckpointConfig, MemoryTierConfig
from llmtrain.config.job import resolve
from llmtrain.plan.make import make_plan
from llmtrain.run.checkpoints import CheckpointInfo, Manifest, begin_save, commit_save
from llmtrain.run.checkpoints.manifest import MANIFEST, encode_manifest
from llmtrain.run.checkpoints.shard import PieceHead, write_shard
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.snapshots import CREATED, RANKS, drop, held_here, make_private, snapshot_name, snapshots_of
from llmtrain.supervise.nodes.node_memory import NodeMemory

NODES = tuple(Node(name=name, address="127.0.0.1") for name in ("n1", "n2", "n3"))
RANKS_IN_ALL = 3
CREATED_AT = 1000.5


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    yield run
    for node in NODES:
        drop(snapshots_of(run.path, node.name))


@pytest.fixture
def memory(run: RunDir) -> NodeMemory:
    spec = resolve("tiny", "local", [])
    tier = CheckpointConfig(memory=MemoryTierConfig(every_steps=5))
    spec = replace(spec, recipe=replace(spec.recipe, checkpoint=tier))
    job = JobFile(run_id="run", version="0", spec=spec, layout=make_plan(spec).plans[0].layout)
    return NodeMemory(run, job, LocalBackend(spec.cluster), created=CREATED_AT)


def shard(folder: Path, rank: int) -> None:
    head = PieceHead("w", "U8", (8 * RANKS_IN_ALL,), (0,), (8 * RANKS_IN_ALL,), 8 * rank, 8)
    write_shard(folder, rank, [head], [memoryview(bytes(8))])


def info(step: int, **extra: object) -> CheckpointInfo:
    return CheckpointInfo(run_id="run", recipe_digest="", step=step, consumed_samples=step, extra=extra)


def hold(
    run: RunDir,
    node: str,
    step: int,
    *shards: int,
    ranks: object = RANKS_IN_ALL,
    created: object = CREATED_AT,
) -> None:
    """Let a node hold shards of a snapshot of attempt 1."""
    folder = snapshots_of(run.path, node) / snapshot_name(step, 1)
    make_private(folder.parent)
    folder.mkdir()
    head = Manifest(info=info(step, **{RANKS: ranks, CREATED: created}), shards=(), tensors={})
    (folder / MANIFEST).write_bytes(encode_manifest(head))
    for rank in shards:
        shard(folder, rank)


def commit(run: RunDir, step: int) -> None:
    folder = begin_save(run.checkpoints, step)
    for rank in range(RANKS_IN_ALL):
        shard(folder, rank)
    commit_save(folder, info(step), RANKS_IN_ALL)


def choose(memory: NodeMemory, used: int = 2) -> tuple[str, list[str]]:
    notes: list[str] = []
    return memory.choose(NODES[:used], NODES[used:], notes.append), notes


def test_the_newest_complete_one_that_no_checkpoint_outdoes(run: RunDir, memory: NodeMemory) -> None:
    assert choose(memory) == ("", [])
    hold(run, "n1", 10, 0, 1)
    hold(run, "n2", 10, 2)
    hold(run, "n1", 15, 0, 1)  # its other node died inside it
    assert choose(memory) == (
        "step-00000010.1",
        ["goes on from step 10 in the nodes' memory; there is no checkpoint"],
    )
    commit(run, 9)
    assert choose(memory)[0] == "step-00000010.1"
    commit(run, 10)
    assert choose(memory) == ("", [])


def test_an_idle_node_gives_what_nobody_else_has(run: RunDir, memory: NodeMemory) -> None:
    hold(run, "n1", 10, 0)
    hold(run, "n2", 10, 1)
    hold(run, "n3", 10, 2, 0)
    assert choose(memory)[0] == "step-00000010.1"
    given = sorted(path.name for path in run.rescued("step-00000010.1").iterdir())
    assert given == ["shard-00002.json", "shard-00002.safetensors"]
    assert choose(memory, used=3)[0] == "step-00000010.1"
    assert not run.rescued("step-00000010.1").exists(), "nothing was needed this time"


def test_torn_shards_and_strangers_do_not_count(run: RunDir, memory: NodeMemory, tmp_path: Path) -> None:
    hold(run, "n1", 10, 0, 1, 2)
    folder = snapshots_of(run.path, "n1") / "step-00000010.1"
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert choose(memory)[0] == ""
    path.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(8))
    path.symlink_to(elsewhere)
    (folder.parent / "step-00000099.1").symlink_to(folder)
    (folder.parent / "step-00000099.1.tmp").mkdir()
    (folder.parent / "step-00000098.1").mkdir()
    [held] = held_here(folder.parent)
    assert (held.step, held.shards) == (10, (0, 2))


def test_a_run_that_had_the_folder_before_left_nothing_to_go_on_from(run: RunDir, memory: NodeMemory) -> None:
    """Deleted and launched again under the same name: memory outlives the folder."""
    hold(run, "n1", 100, 0, 1, 2, created=999.0)
    assert choose(memory) == ("", [])
    hold(run, "n1", 10, 0, 1, 2)
    assert choose(memory)[0] == "step-00000010.1"


@pytest.mark.parametrize("ranks", [0, -1, 1 << 60, "3", None, 3.0, True, [3]])
def test_a_manifest_that_is_no_snapshots_does_not_count(
    run: RunDir, memory: NodeMemory, ranks: object
) -> None:
    """Nor does it hide what is whole."""
    hold(run, "n1", 20, 0, 1, 2, ranks=ranks)
    hold(run, "n1", 10, 0, 1, 2)
    assert choose(memory)[0] == "step-00000010.1"


def test_memory_is_freed_when_the_disk_has_it_all(run: RunDir, memory: NodeMemory) -> None:
    hold(run, "n1", 10, 0, 1, 2)
    commit(run, 8)
    memory.drop(NODES, reached=12)
    assert choose(memory)[0] == "step-00000010.1", "what a resume goes on from"
    commit(run, 12)
    memory.drop(NODES, reached=12)
    assert not snapshots_of(run.path, "n1").exists()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain.errors import RunError

    monkeypatch.setattr("llmtrain.run.snapshots.SHARED_MEMORY", tmp_path)
    folder = snapshots_of(tmp_path / "run", "n1")
    folder.parents[1].mkdir(mode=0o755)
    folder.parents[1].chmod(0o777)
    with pytest.raises(RunError, match="not a folder of this user alone"):
        make_private(folder)
    folder.parents[1].rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    folder.parents[1].symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match="not a folder of this user alone"):
        make_private(folder)
