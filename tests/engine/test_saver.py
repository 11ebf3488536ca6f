"""Saves beside the training: what is on disk is the state of its step, bit for bit, whatever training does
meanwhile; failures and a slow disk cost checkpoints and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.config.layout import Layout
from llmtrain.engine.checkpoint import aside
from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import ALONE, whole
from llmtrain.engine.checkpoint.save import Previous, save_checkpoint
from llmtrain.engine.checkpoint.staging import HostCopy
from llmtrain.engine.saver import Saver, retry_delay
from llmtrain.engine.saving import CheckpointFolder
from llmtrain.engine.state import Progress
from llmtrain.engine.step import Wishes, train_step
from llmtrain.events.schema import CheckpointCommitted, CheckpointFailed, CheckpointSkipped, Payload
from llmtrain.run.checkpoints import CheckpointInfo, list_checkpoints, read_manifest, verify
from tests.support.engine_cases import Case, build, llama, recipe
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.engine

STEPS = 9


def case_of(layout: Layout, **checkpoint: object) -> Case:
    made = recipe(llama(layers=2), steps=STEPS)
    return Case(replace(made, checkpoint=CheckpointConfig(**checkpoint)), layout)  # type: ignore[arg-type]


def train(
    rank: int, case: Case, root: str, wants: Callable[[int], bool] = lambda step: True
) -> tuple[list[Payload], dict[int, list[torch.Tensor]], CheckpointFolder]:
    """Train all steps with a saver; its events, and copies of this rank's state after every step."""
    parts = build(case, rank)
    folder = CheckpointFolder(Path(root), "run", parts, writer="attempt 1")
    told: list[Payload] = []
    saver = Saver(parts, folder, told.append)
    progress, states = Progress(), {}
    saver.begin(0)
    for step in range(1, STEPS + 1):
        saver.wishes_save(step)
        result = train_step(parts, step, Wishes())
        progress.step, progress.rate = step, result.rate
        progress.consumed_samples = step * case.recipe.batch.global_size
        progress.extra, progress.own = {"scale": 2.0**step}, {"rank": rank}
        states[step] = [piece.data.clone() for piece in folder.pieces]
        saver.after_step(progress, wished=wants(step))
    saver.last(progress)
    return told, states, folder


def saved_and_compared(rank: int, world_size: int, case: Case, root: str) -> list[tuple[int, bool]]:
    """Save after every step; compare all that is left with the states of their steps. Steps, and whether
    they are full."""
    torch.set_num_threads(1)
    _, states, folder = train(rank, case, root)
    found = []
    for checkpoint in list_checkpoints(Path(root)):
        for piece in folder.pieces:
            piece.data.fill_(7.0)
        load_pieces(checkpoint.path, folder.pieces)
        same = zip(folder.pieces, states[checkpoint.step], strict=True)
        assert all(torch.equal(piece.data, state) for piece, state in same), checkpoint.name
        manifest = read_manifest(checkpoint.path)
        assert manifest.info.extra["state"]["scale"] == 2.0**checkpoint.step
        assert manifest.shards[rank].state == {"rank": rank}
        found.append((checkpoint.step, manifest.info.base is None))
    return found


def test_what_is_saved_is_the_state_of_its_step(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    case = case_of(Layout(dp=2, micro_batch=2), every=1e9, every_steps=6, incremental=2, keep=2)
    [first, second] = run_ranks(saved_and_compared, 2, tmp_path, case, root)
    assert first == second
    # Full: the first, after two incremental ones, by step, and the last; the incremental ones went with them.
    assert first == [(9, True), (6, True)]
    assert all(verify(checkpoint.path) == [] for checkpoint in list_checkpoints(Path(root)))


def test_incremental_ones_stay_until_a_full_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain.engine.checkpoint.save.PAYS", 1.0)  # early steps change nearly every byte
    case = case_of(Layout(micro_batch=2), every=1e9, incremental=20)
    told = train(0, case, str(tmp_path), lambda step: step < STEPS)[0]
    kinds = [event.is_full for event in told if isinstance(event, CheckpointCommitted)]
    assert kinds == [True, *[False] * 7, True]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [9, 1]


def test_another_layout_gets_what_belongs_to_all(tmp_path: Path) -> None:
    case = case_of(Layout(micro_batch=2), every=0)
    train(0, case, str(tmp_path), lambda _: False)
    same = CheckpointFolder(tmp_path, "run", build(case, 0), writer="attempt 2").restore("newest")[0]
    assert (same.extra["scale"], same.own) == (512.0, {"rank": 0})
    other = replace(case, layout=Layout(micro_batch=2, zero=0))
    moved = CheckpointFolder(tmp_path, "run", build(other, 0), writer="attempt 3").restore("newest")[0]
    assert (moved.extra["scale"], moved.own) == (512.0, {})


def test_a_failed_save_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder cannot be made at first; once it can, the next boundary saves."""
    monkeypatch.setattr("llmtrain.engine.saver.FIRST_RETRY", 0.0)
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    parts = build(case_of(Layout(micro_batch=2), every=0), 0)
    told: list[Payload] = []
    saver = Saver(parts, CheckpointFolder(root, "run", parts, writer="1"), told.append)
    saver.begin(0)
    assert not saver.wishes_save(1)
    saver.after_step(Progress(1, 8), wished=True)
    saver.settle()
    assert [type(event) for event in told if isinstance(event, CheckpointCommitted | CheckpointFailed)] == [
        CheckpointFailed
    ]
    assert list_checkpoints(tmp_path) == []
    root.unlink()
    assert saver.wishes_save(2)
    saver.after_step(Progress(2, 16), wished=True)
    saver.settle()
    assert isinstance(told[-1], CheckpointCommitted | CheckpointFailed)
    assert [checkpoint.step for checkpoint in list_checkpoints(root)] == [2]
    assert not saver.wishes_save(3)


def test_its_steps_are_told_before_a_checkpoint_counts(tmp_path: Path) -> None:
    parts = build(case_of(Layout(micro_batch=2), every=0), 0)
    there = list[list[int]]()

    def before() -> None:
        assert list(tmp_path.rglob("*.safetensors")), "all is written"
        there.append([checkpoint.step for checkpoint in list_checkpoints(tmp_path)])

    saver = Saver(parts, CheckpointFolder(tmp_path, "run", parts, writer="1", before_commit=before), print)
    saver.after_step(Progress(1, 8), wished=True)
    saver.settle()
    saver.last(Progress(2, 16))
    assert there == [[], [1]]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [2, 1]


def test_a_disk_that_is_full_for_days_is_tried_every_five_minutes() -> None:
    assert [retry_delay(failures) for failures in (0, 1, 3, 9, 5000)] == [1.0, 2.0, 8.0, 300.0, 300.0]


def test_no_host_memory_fails_the_save_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(aside, "HostCopy", refuse)
    parts = build(case_of(Layout(micro_batch=2), every=0), 0)
    told: list[Payload] = []
    saver = Saver(parts, CheckpointFolder(tmp_path, "run", parts, writer="1"), told.append)
    saver.after_step(Progress(1, 8), wished=True)
    saver.settle()
    [failed] = [event for event in told if isinstance(event, CheckpointFailed)]
    assert "no host memory for a copy of the state: can't allocate memory" in failed.error


def test_a_slow_disk_skips_the_timer_and_holds_up_what_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    module = "llmtrain.engine.checkpoint.save.save_shard"
    original = __import__("llmtrain.engine.checkpoint.save", fromlist=["save_shard"]).save_shard

    def slow(*arguments: object) -> object:
        assert let_go.wait(60)
        return original(*arguments)

    monkeypatch.setattr(module, slow)
    parts = build(case_of(Layout(micro_batch=2), every=1e-9, every_steps=3), 0)
    told: list[Payload] = []
    saver = Saver(parts, CheckpointFolder(tmp_path, "run", parts, writer="1"), told.append)
    assert saver.wishes_save(1)
    saver.after_step(Progress(1, 8), wished=True)
    assert not saver.wishes_save(2)
    assert [event.step for event in told if isinstance(event, CheckpointSkipped)] == [2]
    threading.Timer(0.2, let_go.set).start()
    saver.after_step(Progress(3, 24), wished=False)  # waits for the first one
    saver.settle()
    assert [event.step for event in told if isinstance(event, CheckpointCommitted)] == [1, 3]


def test_a_copy_in_blocks_is_the_whole_state(tmp_path: Path) -> None:
    """As pinned memory is taken; what a block's end cuts is put together again by a load, also of changes."""
    states = [torch.arange(count, dtype=torch.float32) for count in (10, 300, 64, 1)]
    copies = [HostCopy([whole(f"t{n}", state) for n, state in enumerate(states)], block=256) for _ in "ab"]
    assert len(copies[0].pieces) > len(states)
    assert all(piece.data.nbytes <= 256 and piece.data.data_ptr() % 64 == 0 for piece in copies[0].pieces)
    previous = None
    for step, copy in enumerate(copies):
        for state in states:
            state[-1] = -step - 1.0
        copy.take()
        info = CheckpointInfo(run_id="run", recipe_digest="", step=step, consumed_samples=0)
        saved = save_checkpoint(tmp_path, info, copy.pieces, ALONE, previous=previous)
        previous = Previous(saved.base, copy.pieces)
        loaded = [torch.zeros_like(state) for state in states]
        load_pieces(saved.checkpoint.path, [whole(f"t{n}", state) for n, state in enumerate(loaded)])
        assert saved.is_full == (not step)
        assert all(torch.equal(one, other) for one, other in zip(states, loaded, strict=True))
    for state in states:
        state.zero_()
    copies[1].put_back()
    assert all(torch.equal(one, other) for one, other in zip(states, loaded, strict=True))
