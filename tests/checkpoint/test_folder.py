"""Names, order, pointer, pruning and leftovers of a run's checkpoints."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from llmtrain.errors import CheckpointError, UsageError
from llmtrain.run.checkpoints import (
    CheckpointInfo,
    begin_save,
    clean_leftovers,
    commit_save,
    ever_committed,
    kept_for_ever,
    last_committed,
    list_checkpoints,
    newest_valid,
    prune,
    read_manifest,
    read_pointer,
    resolve_step,
    verify,
)
from llmtrain.run.checkpoints.manifest import document_digest


def names(root):
    return [checkpoint.name for checkpoint in list_checkpoints(root)]


def test_newest_first_and_only_committed_ones(make_checkpoint, tmp_path):
    root = tmp_path / "checkpoints"
    for step in (10, 100, 5):
        make_checkpoint(step)
    begin_save(root, 200)
    for other in ("step-1", "step-abc", "step-00000300.tmp", "notes"):
        (root / other).mkdir()
    assert names(root) == ["step-00000100", "step-00000010", "step-00000005"]
    assert read_pointer(root) == "step-00000005", "committed last"
    assert resolve_step(root, None).step == 100
    assert resolve_step(root, 10).name == "step-00000010"
    with pytest.raises(UsageError) as raised:
        resolve_step(root, 11)
    assert raised.value.problems[0].hint == "steps saved: 100, 10, 5"


def test_after_falling_back_the_last_commit_is_not_the_highest_step(make_checkpoint, tmp_path):
    root = tmp_path / "checkpoints"
    assert last_committed(root) is None
    for step in (73, 64):
        make_checkpoint(step)
    assert last_committed(root).step == 64
    (root / "latest").unlink()
    assert last_committed(root).step == 73


def test_what_a_manifest_says(make_checkpoint):
    manifest = read_manifest(make_checkpoint(10).path)
    assert (manifest.info.step, manifest.info.consumed_samples, manifest.info.run_id) == (10, 80, "run-1")
    assert manifest.tensors["t"].nbytes == 16
    assert manifest.nbytes == sum(shard.bytes for shard in manifest.shards)


def test_a_step_saved_again_does_not_touch_the_first(make_checkpoint, tmp_path):
    root = tmp_path / "checkpoints"
    first = make_checkpoint(10)
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    second = make_checkpoint(10)
    assert second.name == "step-00000010-2"
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before
    assert newest_valid(root).checkpoint == second
    assert make_checkpoint(10).name == "step-00000010-3"
    assert resolve_step(root, 10).generation == 3


def test_prune_keeps_whole_ones_and_never_the_last(make_checkpoint, tmp_path):
    root = tmp_path / "checkpoints"
    made = {step: make_checkpoint(step) for step in (1, 2, 3, 4, 5)}
    for step in (5, 3):
        (made[step].path / "shard-00000.safetensors").unlink()
    assert [checkpoint.step for checkpoint in prune(root, 2)] == [1]
    assert [checkpoint.step for checkpoint in list_checkpoints(root)] == [5, 4, 3, 2]
    assert [checkpoint.step for checkpoint in prune(root, 1)] == [3, 2], "damaged ones do not count"
    assert newest_valid(root).checkpoint == made[4]
    assert prune(root, 1) == []
    with pytest.raises(ValueError, match="at least one checkpoint must be kept"):
        prune(root, 0)


def test_prune_with_nothing_whole_deletes_nothing(make_checkpoint, tmp_path):
    for step in (1, 2):
        (make_checkpoint(step).path / "manifest.json").unlink()
    assert prune(tmp_path / "checkpoints", 1) == []
    assert len(names(tmp_path / "checkpoints")) == 2


def test_prune_spares_the_protected(make_checkpoint, tmp_path):
    for step in range(1, 7):
        make_checkpoint(step)
    prune(tmp_path / "checkpoints", 1, protect=kept_for_ever(3))
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints")] == [6, 3]
    assert len(prune(tmp_path / "checkpoints", 1, protect=kept_for_ever(None))) == 1


def test_leftovers_are_removed_and_nothing_else(make_checkpoint, tmp_path):
    root = tmp_path / "checkpoints"
    make_checkpoint(10)
    half = begin_save(root, 20, "3")
    (half / "shard-00000.safetensors").write_bytes(b"half")
    (root / "step-00000005.deleted.tmp").mkdir()
    (root / ".latest.123.abcd.tmp").write_text("step-00000010\n")
    (root / "mine.tmp").write_text("not ours")
    removed = clean_leftovers(root)
    assert sorted(removed) == [".latest.123.abcd.tmp", "step-00000005.deleted.tmp", "step-00000020.3.tmp"]
    assert sorted(path.name for path in root.iterdir()) == ["latest", "mine.tmp", "step-00000010"]
    assert clean_leftovers(tmp_path / "nothing") == []


def test_a_leftover_link_is_removed_but_not_followed(tmp_path):
    root, outside = tmp_path / "checkpoints", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("x")
    (root / "step-00000001.tmp").symlink_to(outside)
    assert clean_leftovers(root) == ["step-00000001.tmp"]
    assert (outside / "precious").exists()


@pytest.mark.parametrize(
    "content", ["", "../../etc", "step-00000010.tmp", "\xff", "step-00000010\nmore" * 50]
)
def test_a_garbage_pointer_points_nowhere(make_checkpoint, tmp_path, content):
    root = tmp_path / "checkpoints"
    newest = make_checkpoint(10)
    (root / "latest").write_bytes(content.encode("latin-1"))
    assert read_pointer(root) is None
    assert newest_valid(root).checkpoint == newest
    assert ever_committed(root)


def test_a_commit_without_all_sidecars_fails_and_changes_nothing(make_checkpoint, tmp_path):
    root = tmp_path / "checkpoints"
    before = make_checkpoint(10)
    folder = begin_save(root, 20)
    info = CheckpointInfo(run_id="run-1", recipe_digest="", step=20, consumed_samples=0)
    with pytest.raises(CheckpointError) as raised:
        commit_save(folder, info, 2)
    assert raised.value.text().endswith("shard-00000.json: missing")
    assert read_pointer(root) == before.name
    assert newest_valid(root).checkpoint == before


def test_a_shape_that_ranks_disagree_on_is_named(tmp_path):
    from tests.checkpoint.conftest import write_shard

    folder = begin_save(tmp_path, 20)
    for rank in range(2):
        write_shard(folder, rank)
    sidecar = folder / "shard-00001.json"
    document = json.loads(sidecar.read_text())
    document["tensors"]["t"]["shape"] = [20]
    sidecar.write_text(json.dumps(document))
    info = CheckpointInfo(run_id="r", recipe_digest="", step=20, consumed_samples=0)
    with pytest.raises(CheckpointError, match=r"'t' is U8 \[20\] on rank 1, but U8 \[16\] on a lower rank"):
        commit_save(folder, info, 2)


def test_an_unreadable_root_is_an_error_not_an_empty_run(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
        list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize("steps", [(10,), (10, 20)])
def test_what_earlier_versions_wrote_is_read(make_chain, steps):
    """Manifests of schemas 1 and 2 hold SHA-256, which is still compared."""
    digests = {}
    for one in make_chain(*steps):
        path = one.path / "manifest.json"
        document = json.loads(path.read_text())
        document["schema"] = {3: 1, 4: 2}[document["schema"]]
        for shard in document["shards"]:
            del shard["checksum"]
            shard["sha256"] = hashlib.sha256((one.path / shard["file"]).read_bytes()).hexdigest()
        if "base" in document:
            document["base"]["digest"] = digests[document["base"]["name"]]
        digests[one.name] = document["digest"] = document_digest(document)
        path.write_text(json.dumps(document))
        assert verify(one.path) == []
    shard = one.path / document["shards"][0]["file"]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "damaged: its checksum is not the manifest's" in verify(one.path)[0].message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_pointer_that_is_no_file_points_nowhere(make_checkpoint, tmp_path, put):
    """It neither blocks nor is read without end."""
    root = tmp_path / "checkpoints"
    newest = make_checkpoint(10)
    (root / "latest").unlink()
    put(root / "latest")
    assert read_pointer(root) is None
    assert newest_valid(root).checkpoint == newest
