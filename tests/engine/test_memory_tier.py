"""Snapshots in shared memory: of whole nodes' ranks, restored under any layout, also when nodes are gone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmtrain.config.checkpoint import CheckpointConfig, MemoryTierConfig
from llmtrain.config.layout import Layout
from llmtrain.engine.memory_tier import MemoryTier
from llmtrain.engine.saver import Saver
from llmtrain.engine.saving import FROM_MEMORY, CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import Wishes, train_step
from llmtrain.events.schema import Payload, SnapshotTaken
from llmtrain.run.checkpoints import list_checkpoints
from llmtrain.run.job_file import AttemptFile
from llmtrain.run.layout import RunDir
from llmtrain.run.snapshots import drop, held_here, newest_complete, snapshots_of
from tests.support.engine_cases import Case, build, llama, recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

FOUR = Layout(dp=4, micro_batch=1)
NODES = ("n1", "n2", "n3", "n4")


def case_of(layout: Layout, copies: int = 1) -> Case:
    config = CheckpointConfig(every=0, memory=MemoryTierConfig(every_steps=2, copies=copies))  # type: ignore[arg-type]
    return Case(replace(recipe(llama(layers=2), steps=6), checkpoint=config), layout)


def attempt_of(
    number: int, layout: Layout, nodes: tuple[str, ...], snapshot: str = "", created: float = 1.0
) -> AttemptFile:
    share = layout.world_size // len(nodes)
    ranks = tuple(tuple(range(node * share, (node + 1) * share)) for node in range(len(nodes)))
    return AttemptFile(
        number=number,
        layout=layout,
        nodes=nodes,
        ranks=ranks,
        restore="newest",
        snapshot=snapshot,
        run_created=created,
    )


def folder_of(
    rank: int, case: Case, run: RunDir, attempt: AttemptFile, before: Callable[[], object] = lambda: None
) -> tuple[object, CheckpointFolder]:
    parts = build(case, rank)
    memory = MemoryTier(run, attempt, parts)
    writer = f"attempt {attempt.number}"
    folder = CheckpointFolder(
        run.checkpoints, "run", parts, writer=writer, memory=memory, before_commit=before
    )
    return parts, folder


def digests(folder: CheckpointFolder) -> dict[str, str]:
    """Of every piece that this rank owns, by name and place: what is equal over all layouts after
    gathering."""
    return {
        f"{piece.key} {piece.box_start} {piece.flat_start}": hashlib.sha256(piece.data.numpy()).hexdigest()
        for piece in folder.pieces
        if piece.owner
    }


def train(rank: int, world_size: int, case: Case, run: RunDir, attempt: AttemptFile) -> dict[str, str]:
    """Four steps with snapshots after the second and the fourth; digests of the state then."""
    torch.set_num_threads(1)
    parts, folder = folder_of(rank, case, run, attempt)
    told: list[Payload] = []
    saver = Saver(parts, folder, told.append)  # type: ignore[arg-type]
    saver.begin(0)
    for step in range(1, 5):
        result = train_step(parts, step, Wishes(snapshot=saver.wishes_snapshot(step)))  # type: ignore[arg-type]
        progress = Progress(step, step * case.recipe.batch.global_size, result.rate)
        # The wish may be left out while the one before is being copied; here each is waited for.
        saver.after_step(progress, wished=False, snapshot=result.wishes.snapshot)
        saver.settle()
    if rank == 0:
        assert [event.step for event in told if isinstance(event, SnapshotTaken)] == [2, 4], told
    return digests(folder)


def restore(
    rank: int, world_size: int, case: Case, run: RunDir, attempt: AttemptFile
) -> tuple[dict[str, str], int, str | None, str]:
    torch.set_num_threads(1)
    parts, folder = folder_of(rank, case, run, attempt)
    parts.buckets.initialise(99)  # type: ignore[attr-defined]
    progress, name, reason = folder.restore("newest")
    return digests(folder), progress.step, name, reason


@pytest.fixture
def run(tmp_path: Path):
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    yield run
    for node in NODES:
        drop(snapshots_of(run.path, node))


def joined(results: list[dict[str, str]]) -> dict[str, str]:
    return {key: value for result in results for key, value in result.items()}


def trained(tmp_path: Path, run: RunDir, copies: int = 1) -> dict[str, str]:
    case = case_of(FOUR, copies)
    return joined(run_ranks(train, 4, tmp_path, case, run, attempt_of(1, FOUR, NODES)))


def held_by(run: RunDir, *nodes: str):
    return {node: held_here(snapshots_of(run.path, node)) for node in nodes}


def test_any_one_node_may_be_lost_and_the_layout_may_change(tmp_path: Path, run: RunDir) -> None:
    before = trained(tmp_path, run)
    found = held_by(run, *NODES)
    assert all([one.name for one in held] == ["step-00000004.1"] for held in found.values()), found
    assert all(len(held[0].shards) == 2 for held in found.values())
    drop(snapshots_of(run.path, "n2"))
    left = ("n1", "n3", "n4")
    assert newest_complete(held_by(run, *left)) == ("step-00000004.1", 4)
    # The same ranks on other nodes, one of which is new and empty.
    again = run_ranks(
        restore, 4, tmp_path, case_of(FOUR), run, attempt_of(2, FOUR, (*left, "n2"), "step-00000004.1")
    )
    assert [answer[1:] for answer in again] == [(4, "step-00000004.1", FROM_MEMORY)] * 4
    assert joined([answer[0] for answer in again]) == before
    # Another dp on the nodes left: bit for bit what the disk would give is checked by gathering in turn.
    three = Layout(dp=3, micro_batch=1)
    other = run_ranks(
        restore, 3, tmp_path, case_of(three), run, attempt_of(3, three, left, "step-00000004.1")
    )
    assert [answer[1:] for answer in other] == [(4, "step-00000004.1", FROM_MEMORY)] * 3
    one = Layout(micro_batch=1)
    whole = run_ranks(restore, 1, tmp_path, case_of(one), run, attempt_of(4, one, ("n1",), "step-00000004.1"))
    assert whole[0][1:3] == (0, None)
    assert "shards [" in whole[0][3], "n1 alone does not hold all of it, and says what is missing"
    # A run that was launched anew into the same folder does not take its predecessor's for its own.
    stranger = attempt_of(2, one, ("n1",), "step-00000004.1", created=2.0)
    fresh = run_ranks(restore, 1, tmp_path, case_of(one), run, stranger)
    assert fresh[0][1:3] == (0, None)
    assert held_by(run, "n1") == {"n1": []}


def test_two_nodes_may_be_lost_when_so_configured(tmp_path: Path, run: RunDir) -> None:
    before = trained(tmp_path, run, copies=2)
    drop(snapshots_of(run.path, "n1"))
    drop(snapshots_of(run.path, "n3"))
    attempt = attempt_of(2, FOUR, ("n2", "n4"), "step-00000004.1")
    again = run_ranks(restore, 4, tmp_path, case_of(FOUR, 2), run, attempt)
    assert [answer[1:] for answer in again] == [(4, "step-00000004.1", FROM_MEMORY)] * 4
    assert joined([answer[0] for answer in again]) == before


def test_a_rewind_drops_what_was_held_of_the_steps_it_takes_back(run: RunDir) -> None:
    case = case_of(Layout(micro_batch=1))
    held_before = list[object]()
    attempt = attempt_of(1, case.layout, ("n1",))
    parts, folder = folder_of(0, case, run, attempt, lambda: held_before.append(held_by(run, "n1")["n1"]))
    saver = Saver(parts, folder, lambda _: None)  # type: ignore[arg-type]
    for step in (1, 2):
        train_step(parts, step, Wishes())  # type: ignore[arg-type]
    saver.after_step(Progress(2, 2 * case.recipe.batch.global_size), wished=False, snapshot=True)
    saver.settle()
    assert [one.step for one in held_by(run, "n1")["n1"]] == [2]
    assert held_before == [[]], "its steps are told before it counts"
    saver.reload()
    assert held_by(run, "n1") == {"n1": []}


def test_damage_is_found_and_the_disk_is_what_remains(tmp_path: Path, run: RunDir) -> None:
    trained(tmp_path, run)
    for node in NODES:
        for path in snapshots_of(run.path, node).rglob("shard-00002.safetensors"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    answers = run_ranks(
        restore, 4, tmp_path, case_of(FOUR), run, attempt_of(2, FOUR, NODES, "step-00000004.1")
    )
    assert len({answer[1:] for answer in answers}) == 1
    assert answers[0][1:3] == (0, None)
    assert "checksum is not" in answers[0][3]
    assert list_checkpoints(run.checkpoints) == []
