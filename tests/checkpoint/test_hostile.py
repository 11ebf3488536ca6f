"""Damaged and malicious checkpoints: each fault is found and named, nothing outside is read, the one before
is used."""

from __future__ import annotations

import json
import os
import random

import pytest

from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import newest_valid, read_manifest, verify
from llmtrain.run.checkpoints.manifest import document_digest


def edit(path, change):
    """Change a manifest as somebody would who can compute digests."""
    manifest = path / "manifest.json"
    document = json.loads(manifest.read_text())
    change(document)
    document["digest"] = document_digest(document)
    manifest.write_text(json.dumps(document))


def piece(document):
    return document["tensors"]["t"]["pieces"][1]


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


SHARD = "shard-00001.safetensors"

DAMAGES = {
    "bit flip in a shard": (lambda p: flip(p / SHARD, -3), "damaged: its checksum is not the manifest's"),
    "truncated shard": (lambda p: os.truncate(p / SHARD, 20), "truncated: 20 bytes"),
    "empty shard": (lambda p: os.truncate(p / SHARD, 0), "empty: 0 bytes"),
    "longer shard": (lambda p: (p / SHARD).open("ab").write(b"x"), "too long"),
    "missing shard": (lambda p: (p / SHARD).unlink(), f"{SHARD}: missing"),
    "shard is a folder": (lambda p: ((p / SHARD).unlink(), (p / SHARD).mkdir()), "is not a regular file"),
    "shard is a pipe": (lambda p: ((p / SHARD).unlink(), os.mkfifo(p / SHARD)), "is not a regular file"),
    "shard is a link": (
        lambda p: ((p / SHARD).rename(p / "elsewhere"), (p / SHARD).symlink_to(p / "elsewhere")),
        "is a symbolic link, which is never followed",
    ),
    "bit flip in the manifest": (
        lambda p: (p / "manifest.json").write_text(
            (p / "manifest.json").read_text().replace('"consumed_samples":80', '"consumed_samples":88')
        ),
        "digest does not match",
    ),
    "odd learning rate": (
        lambda p: edit(p, lambda d: d["extra"].update(learning_rate="fast")),
        "learning rate is 'fast', not a number",
    ),
    "odd seed": (lambda p: edit(p, lambda d: d["extra"].update(seed=True)), "its seed is True"),
    "odd model": (lambda p: edit(p, lambda d: d["extra"].update(model=[1])), "its model is not an object"),
    "odd state": (lambda p: edit(p, lambda d: d["extra"].update(state="s")), "its state is not an object"),
    "odd layout": (lambda p: edit(p, lambda d: d["layout"].update(dp="two")), "dp of its layout is 'two'"),
    "no replica": (lambda p: edit(p, lambda d: d["layout"].update(tp=0)), "tp of its layout is 0"),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "manifest.json: missing"),
    "manifest empty": (lambda p: os.truncate(p / "manifest.json", 0), "is not JSON"),
    "manifest cut": (lambda p: os.truncate(p / "manifest.json", 100), "is not JSON"),
    "manifest not text": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "manifest a list": (lambda p: (p / "manifest.json").write_text("[]"), "is not a JSON object"),
    "manifest of NaN": (lambda p: (p / "manifest.json").write_text('{"step": NaN}'), "NaN is not a number"),
    "manifest nested deep": (lambda p: (p / "manifest.json").write_text("[" * 200_000), "is not JSON"),
    "manifest of a huge number": (
        lambda p: (p / "manifest.json").write_text('{"step": ' + "9" * 100_000 + "}"),
        "is not JSON",
    ),
    "manifest is a link": (
        lambda p: (
            (p / "manifest.json").rename(p / "other.json"),
            (p / "manifest.json").symlink_to(p / "other.json"),
        ),
        "is a symbolic link, which is never followed",
    ),
    "other schema": (
        lambda p: edit(p, lambda d: d.update(schema=2)),
        "schema is 2, this version reads 1 and 3",
    ),
    "shard outside": (
        lambda p: edit(p, lambda d: d["shards"][1].update(file="../../x")),
        "shards[1].file is '../../x', which is not allowed here",
    ),
    "absolute shard": (
        lambda p: edit(p, lambda d: d["shards"][1].update(file="/etc/passwd")),
        "shards[1].file is '/etc/passwd', which is not allowed here",
    ),
    "shard with a line end": (
        lambda p: edit(p, lambda d: d["shards"][1].update(file=SHARD + "\n")),
        "which is not allowed here",
    ),
    "shard named twice": (
        lambda p: edit(p, lambda d: d["shards"][1].update(d["shards"][0])),
        "shards names a file twice",
    ),
    "negative size": (lambda p: edit(p, lambda d: d["shards"][1].update(bytes=-1)), "shards[1].bytes is -1"),
    "fractional size": (
        lambda p: edit(p, lambda d: d["shards"][1].update(bytes=1.5)),
        "shards[1].bytes is 1.5",
    ),
    "boolean size": (
        lambda p: edit(p, lambda d: d["shards"][1].update(bytes=True)),
        "shards[1].bytes is True",
    ),
    "size beyond 2^62": (
        lambda p: edit(p, lambda d: d["shards"][1].update(bytes=1 << 63)),
        "not a whole number in 0..2^62",
    ),
    "wrong checksum form": (
        lambda p: edit(p, lambda d: d["shards"][1].update(checksum="xxh128:00")),
        "shards[1].checksum is 'xxh128:00'",
    ),
    "unknown kind of checksum": (
        lambda p: edit(p, lambda d: d["shards"][1].update(checksum="md5:" + "0" * 32)),
        "shards[1].checksum is 'md5:00000",
    ),
    "no checksum": (
        lambda p: edit(p, lambda d: d["shards"][1].pop("checksum")),
        "shards[1].checksum is None",
    ),
    "checksum of another kind": (
        lambda p: edit(p, lambda d: d["shards"][1].update(checksum="sha256:" + "0" * 64)),
        "damaged: its checksum is not the manifest's",
    ),
    "unknown dtype": (
        lambda p: edit(p, lambda d: d["tensors"]["t"].update(dtype="F31")),
        "tensors['t'].dtype is 'F31'",
    ),
    "shape of too many elements": (
        lambda p: edit(p, lambda d: d["tensors"]["t"].update(shape=[1 << 40, 1 << 40])),
        "more than 2^62 elements",
    ),
    "shape of too many axes": (
        lambda p: edit(p, lambda d: d["tensors"]["t"].update(shape=[1] * 1000)),
        "has 1000 axes, more than 16",
    ),
    "piece beyond the file": (
        lambda p: edit(p, lambda d: piece(d).update(bytes=[1 << 40, (1 << 40) + 8])),
        "do not hold 8 elements inside the shard",
    ),
    "piece of wrong length": (
        lambda p: edit(p, lambda d: piece(d).update(bytes=[0, 7])),
        "0..7 do not hold 8 elements inside the shard",
    ),
    "piece in no shard": (
        lambda p: edit(p, lambda d: piece(d).update(shard=2)),
        "shard is 2, which is no shard",
    ),
    "piece outside the tensor": (
        lambda p: edit(p, lambda d: piece(d).update(box=[[1], [16]])),
        "is outside the tensor's shape",
    ),
    "piece outside its box": (
        lambda p: edit(p, lambda d: piece(d).update(flat=[9, 8])),
        "9 + 8 is outside a box of 16 elements",
    ),
    "piece stored twice": (
        lambda p: edit(p, lambda d: piece(d).update(flat=[0, 8])),
        "tensor 't': elements 0..8 of box [0:16] are stored twice",
    ),
    "piece left out": (
        lambda p: edit(p, lambda d: d["tensors"]["t"]["pieces"].pop()),
        "tensor 't': elements 8..16 of box [0:16] are missing",
    ),
    "tensors not an object": (
        lambda p: edit(p, lambda d: d.update(tensors=[])),
        "tensors is [], not an object",
    ),
    "step of another folder": (lambda p: edit(p, lambda d: d.update(step=99)), "its manifest is of step 99"),
    "another run": (
        lambda p: edit(p, lambda d: d.update(run_id="run-2")),
        "is of run 'run-2', not of 'run-1'",
    ),
    "another recipe": (
        lambda p: edit(p, lambda d: d.update(recipe_digest="x")),
        "was written for recipe digest 'x', not 'recipe-1'",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_named_and_the_one_before_is_used(make_checkpoint, tmp_path, name):
    damage, message = DAMAGES[name]
    before, newest = make_checkpoint(5), make_checkpoint(10)
    assert verify(newest.path, run_id="run-1", recipe_digest="recipe-1") == []
    damage(newest.path)
    problems = verify(newest.path, run_id="run-1", recipe_digest="recipe-1")
    assert message in "\n".join(problem.text() for problem in problems)
    chosen = newest_valid(tmp_path / "checkpoints", run_id="run-1", recipe_digest="recipe-1")
    assert chosen.checkpoint == before
    assert message in "\n".join(problem.text() for problem in chosen.skipped)
    assert chosen.reason


def test_random_bit_flips_are_all_found(make_checkpoint):
    """Anywhere in any file that a load reads."""
    checkpoint = make_checkpoint(10)
    rng = random.Random(3)
    for _ in range(200):
        path = checkpoint.path / rng.choice(["manifest.json", "shard-00000.safetensors", SHARD])
        original = path.read_bytes()
        content = bytearray(original)
        position = rng.randrange(len(content))
        content[position] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        assert verify(checkpoint.path) != [] or json.loads(content) == json.loads(original), (
            path.name,
            position,
        )
        path.write_bytes(original)
    assert verify(checkpoint.path) == []


def test_a_linked_checkpoint_folder_is_not_followed(make_checkpoint, tmp_path):
    real = make_checkpoint(10)
    moved = tmp_path / "moved"
    real.path.rename(moved)
    real.path.symlink_to(moved)
    assert "symbolic link" in verify(real.path)[0].message
    with pytest.raises(CheckpointError) as raised:
        newest_valid(tmp_path / "checkpoints")
    assert "`latest` names it) but is a symbolic link" in raised.value.text()


def test_never_silently_fresh(make_checkpoint, tmp_path):
    root = tmp_path / "checkpoints"
    assert newest_valid(root).checkpoint is None, "no checkpoint ever: the seed is right"
    only = make_checkpoint(10)
    (only.path / SHARD).unlink()
    with pytest.raises(CheckpointError) as raised:
        newest_valid(root)
    text = raised.value.text()
    assert "none is whole; it does not start over by itself" in text
    assert f"{SHARD}: missing" in text


def test_the_pointer_alone_is_proof_of_a_commit(make_checkpoint, tmp_path):
    import shutil

    shutil.rmtree(make_checkpoint(10).path)
    with pytest.raises(CheckpointError, match="none is whole"):
        newest_valid(tmp_path / "checkpoints")


def test_a_missing_newest_one_is_mentioned(make_checkpoint, tmp_path):
    import shutil

    before, newest = make_checkpoint(5), make_checkpoint(10)
    shutil.rmtree(newest.path)
    chosen = newest_valid(tmp_path / "checkpoints")
    assert chosen.checkpoint == before
    assert chosen.reason == "step-00000010: was committed last (`latest` names it) but is missing"


def test_a_manifest_too_large_is_not_read(make_checkpoint, monkeypatch):
    from llmtrain.run.checkpoints import parse

    checkpoint = make_checkpoint(10)
    monkeypatch.setattr(parse, "MOST_BYTES", 100)
    with pytest.raises(CheckpointError, match="is larger than 100 bytes"):
        read_manifest(checkpoint.path)
