"""The commit protocol between real processes: all ranks succeed or all fail, alike."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmtrain.engine.checkpoint.choose import choose_checkpoint
from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import Piece, Ranks, whole
from llmtrain.engine.checkpoint.save import save_checkpoint
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import CheckpointInfo, newest_valid, read_pointer, verify

pytestmark = pytest.mark.engine
WORLD = 3
ROWS = 1000


def in_ranks(folder: Path, body) -> list[str]:
    """Fork WORLD gloo ranks that run `body(ranks) -> str`; return what each returned."""
    torch.set_num_threads(1)
    (folder / "rendezvous").unlink(missing_ok=True)
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                answer = folder / f"answer-{rank}"
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
                )

                def exchange(text: str) -> list[str]:
                    texts: list[str] = [""] * WORLD
                    dist.all_gather_object(texts, text)
                    return texts

                answer.write_text(body(Ranks(rank, WORLD, exchange)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * WORLD
    return [(folder / f"answer-{rank}").read_text() for rank in range(WORLD)]


def piece_of(rank: int, step: int) -> Piece:
    """Rows of a [3000, 8] tensor, a third on each rank."""
    rows = torch.arange(rank * ROWS * 8, (rank + 1) * ROWS * 8).float() + step
    return Piece("w", (WORLD * ROWS, 8), (rank * ROWS, 0), (ROWS, 8), 0, rows)


def save(root: Path, ranks: Ranks, step: int) -> str:
    info = CheckpointInfo(run_id="r", recipe_digest="d", step=step, consumed_samples=step)
    try:
        return (
            "saved "
            + save_checkpoint(root, info, [piece_of(ranks.rank, step)], ranks, writer="7").checkpoint.name
        )
    except CheckpointError as error:
        return error.text()


def check_loads(root: Path, step: int) -> None:
    chosen = newest_valid(root)
    assert chosen.checkpoint is not None
    assert chosen.checkpoint.step == step
    target = whole("w", torch.zeros(WORLD * ROWS, 8))
    load_pieces(chosen.checkpoint.path, [target])
    assert torch.equal(target.data, torch.arange(WORLD * ROWS * 8).float() + step)


def test_all_ranks_commit_one_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    answers = in_ranks(tmp_path, lambda ranks: save(root, ranks, 1) + ", " + save(root, ranks, 2))
    assert answers == ["saved step-00000001, saved step-00000002"] * WORLD
    assert verify(root / "step-00000002") == []
    check_loads(root, 2)


def test_a_rank_that_fails_fails_all_and_the_one_before_stays(tmp_path):
    root = tmp_path / "checkpoints"

    def body(ranks: Ranks) -> str:
        first = save(root, ranks, 1)
        if ranks.rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        second = save(root, ranks, 2)
        return f"{first}|{second}"

    answers = in_ranks(tmp_path, body)
    assert len(set(answers)) == 1
    first, second = answers[0].split("|")
    assert first == "saved step-00000001"
    assert second == "saving step 2 failed: rank 2: File too large"
    assert read_pointer(root) == "step-00000001"
    check_loads(root, 1)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000001"]


def test_a_commit_that_fails_on_rank_0_fails_all(tmp_path):
    """Two ranks claim the same elements: only the one that merges can see it."""
    root = tmp_path / "checkpoints"

    def body(ranks: Ranks) -> str:
        info = CheckpointInfo(run_id="r", recipe_digest="d", step=1, consumed_samples=0)
        try:
            save_checkpoint(root, info, [piece_of(min(ranks.rank, 1), 1)], ranks)
        except CheckpointError as error:
            return error.text()
        return "saved"

    answers = in_ranks(tmp_path, body)
    assert len(set(answers)) == 1
    assert "rank 0:" in answers[0]
    assert "tensor 'w': elements 0..8000 of box [1000:2000, 0:8] are stored twice" in answers[0]
    assert newest_valid(root).checkpoint is None


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda root: None, ("step-00000002", "")),
        (
            lambda root: flip(root / "step-00000002" / "shard-00001.safetensors"),
            ("step-00000001", "checksum"),
        ),
        (
            lambda root: (root / "step-00000002" / "shard-00002.safetensors").unlink(),
            ("step-00000001", "missing"),
        ),
        (lambda root: flip(root / "step-00000002" / "manifest.json"), ("step-00000001", "manifest.json: ")),
    ],
)
def test_all_ranks_choose_the_same_checkpoint(tmp_path, damage, expected):
    root = tmp_path / "checkpoints"

    def body(ranks: Ranks) -> str:
        before = choose_checkpoint(root, ranks, run_id="r")
        save(root, ranks, 1)
        save(root, ranks, 2)
        if ranks.rank == 0:
            damage(root)
        ranks.exchange("")
        return json.dumps([before, choose_checkpoint(root, ranks, run_id="r")])

    answers = in_ranks(tmp_path, body)
    assert len(set(answers)) == 1
    before, (name, reason) = json.loads(answers[0])
    assert before == ["", ""]
    assert name == expected[0]
    assert expected[1] in reason


def test_all_ranks_refuse_when_nothing_is_whole(tmp_path):
    root = tmp_path / "checkpoints"

    def body(ranks: Ranks) -> str:
        for step in (1, 2):
            save(root, ranks, step)
        if ranks.rank == 0:
            flip(root / "step-00000001" / "shard-00000.safetensors")
            flip(root / "step-00000002" / "shard-00001.safetensors")
        ranks.exchange("")
        try:
            choose_checkpoint(root, ranks, run_id="r")
        except CheckpointError as error:
            return error.text()
        return "chosen"

    answers = in_ranks(tmp_path, body)
    assert len(set(answers)) == 1
    assert "none is whole" in answers[0]
    for shard in ("step-00000001/shard-00000", "step-00000002/shard-00001"):
        assert f"{shard}.safetensors: damaged: its checksum is not the manifest's" in answers[0]


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def mounted(folder: Path, *options: str):
    """A small memory file system; skips where it may not be mounted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a file system needs root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_last_checkpoint_and_is_cured_by_space(tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, "-o", "size=288k"):
        root, ballast = disk / "checkpoints", disk / "ballast"

        def body(ranks: Ranks) -> str:
            first = save(root, ranks, 1)
            if ranks.rank == 0:
                ballast.write_bytes(b"x" * 100_000)
            ranks.exchange("")
            second = save(root, ranks, 2)
            ranks.exchange("")
            if ranks.rank == 0:
                ballast.unlink()
            ranks.exchange("")
            return f"{first}|{second}|{save(root, ranks, 3)}"

        answers = in_ranks(tmp_path, body)
        assert len(set(answers)) == 1
        first, second, third = answers[0].split("|")
        assert (first, third) == ("saved step-00000001", "saved step-00000003")
        assert second.startswith("saving step 2 failed: rank ")
        assert "No space left on device" in second
        check_loads(root, 3)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_a_read_only_folder_is_an_error_on_all_ranks(tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, "-o", "ro"):
        answers = in_ranks(tmp_path, lambda ranks: save(disk / "checkpoints", ranks, 1))
    assert len(set(answers)) == 1
    assert answers[0].startswith("saving step 1 failed: rank 0: ")
    assert "Read-only file system" in answers[0]
