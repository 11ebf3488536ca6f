"""Incremental checkpoints: bit-exact over any chain, damage anywhere in it is found, deletion never breaks
it."""

from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import ALONE, Piece, whole
from llmtrain.engine.checkpoint.save import Previous, save_checkpoint
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import (
    CheckpointInfo,
    list_checkpoints,
    newest_valid,
    outdated,
    prune,
    read_chain,
    read_manifest,
    verify,
)
from llmtrain.run.checkpoints.arrays import read_tensor
from llmtrain.run.checkpoints.delta import block_lengths, decode, encode
from llmtrain.run.checkpoints.manifest import document_digest

pytestmark = pytest.mark.engine


@settings(max_examples=60, deadline=None)
@given(
    item=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(0, 3000),
    changed=st.sampled_from([0.0, 0.01, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_blocks_are_bit_exact(item, count, changed, seed):
    chance = np.random.default_rng(seed)
    old = chance.integers(0, 256, count * item, dtype=np.uint8)
    new = np.where(chance.random(old.size) < changed, chance.integers(0, 256, old.size, dtype=np.uint8), old)
    stored = [bytes(block) for block in encode(new, old, item)]
    assert all(len(block) <= length for block, length in zip(stored, block_lengths(new.size), strict=True))
    found = old.copy()
    for block, length in zip(stored, block_lengths(new.size), strict=True):
        decode(memoryview(block), length, found, item)
    assert (found == new).all()
    if not changed:
        assert stored in ([], [b""])


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_differences_wrap_around_at_both_ends(kind):
    edges = np.array(
        [0, 1, 2, np.iinfo(kind).max // 2, np.iinfo(kind).max // 2 + 1, np.iinfo(kind).max], kind
    )
    old, new = (np.ascontiguousarray(side).reshape(-1) for side in np.meshgrid(edges, edges))
    old, new = np.tile(old, 40), np.tile(new, 40)  # enough for packing to pay
    [stored] = encode(new.view(np.uint8), old.view(np.uint8), old.itemsize)
    assert stored.nbytes < new.nbytes
    decode(stored, new.nbytes, old.view(np.uint8), old.itemsize)
    assert (old == new).all()


def test_a_chain_of_an_earlier_version_holds_xor(make_chain):
    """Schema 2: planes of XOR, under SHA-256."""
    import zstandard

    [_, one] = make_chain(1, 2)
    old, new = (torch.arange(1000.0) + step for step in (1, 2))
    changed = (new.view(torch.uint8) ^ old.view(torch.uint8)).numpy()
    block = zstandard.ZstdCompressor().compress(changed.reshape(-1, 4).T.tobytes())
    (one.path / "shard-00000.delta").write_bytes(block)

    def of_an_earlier_version(document):
        document["schema"] = 2
        [shard], [piece] = document["shards"], document["tensors"]["w"]["pieces"]
        del shard["checksum"]
        shard.update(bytes=len(block), sha256=hashlib.sha256(block).hexdigest())
        piece.update(bytes=[0, len(block)], blocks=[len(block)])

    rewritten(one.path / "manifest.json", of_an_earlier_version)
    assert verify(one.path) == []
    assert (read_tensor(one.path, read_manifest(one.path), "w") == new.numpy()).all()


@pytest.mark.parametrize("stored", [b"x", b"\x28\xb5\x2f\xfd\x20", b"\0" * 39])
def test_what_is_no_block_is_refused(stored):
    with pytest.raises(ValueError, match="block"):
        decode(memoryview(stored), 40, np.zeros(40, np.uint8), 4)


def test_a_bomb_is_refused_before_memory_is_taken():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(ValueError, match="another length"):
        decode(memoryview(bomb), 1 << 22, np.zeros(1 << 22, np.uint8), 4)


def test_a_chain_loads_under_another_cut(make_chain):
    chain = make_chain(1, 2, 3, 4)
    assert [len(read_chain(one.path)) for one in chain] == [1, 2, 3, 4]
    for one in chain:
        expected = torch.arange(1000.0) + one.step
        assert verify(one.path) == []
        assert (read_tensor(one.path, read_manifest(one.path), "w") == expected.numpy()).all()
        part = Piece("w", (1000,), (0,), (1000,), 333, torch.zeros(500))
        load_pieces(one.path, [part])
        assert torch.equal(part.data, expected[333:833])


def test_what_does_not_pay_is_written_in_full(tmp_path):
    chance = torch.Generator().manual_seed(1)
    old = [whole("w", torch.randint(0, 255, (100_000,), dtype=torch.uint8, generator=chance))]
    info = CheckpointInfo(run_id="r", recipe_digest="", step=1, consumed_samples=0)
    saved = save_checkpoint(tmp_path, info, old, ALONE)
    info = CheckpointInfo(run_id="r", recipe_digest="", step=2, consumed_samples=0)
    new = [whole("w", torch.randint(0, 255, (100_000,), dtype=torch.uint8, generator=chance))]
    saved = save_checkpoint(tmp_path, info, new, ALONE, previous=Previous(saved.base, old))
    assert saved.is_full
    assert sorted(path.name for path in saved.checkpoint.path.iterdir()) == [
        "manifest.json",
        "shard-00000.json",
        "shard-00000.safetensors",
    ]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def rewritten(path, change):
    document = json.loads(path.read_text())
    change(document)
    document["digest"] = document_digest(document)
    path.write_text(json.dumps(document))


def replace_base(chain):
    """Another checkpoint in the place of the one that was built upon."""
    rewritten(chain[0].path / "manifest.json", lambda document: document.update(consumed_samples=9))


def link_base(chain):
    target = chain[0].path.with_name("elsewhere")
    chain[0].path.rename(target)
    chain[0].path.symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda chain: flip(chain[0].path / "shard-00000.safetensors"), "checksum is not"),
        (lambda chain: flip(chain[1].path / "shard-00000.delta"), "checksum is not"),
        (lambda chain: (chain[1].path / "shard-00000.delta").write_bytes(b""), "empty"),
        (lambda chain: (chain[1].path / "shard-00000.delta").unlink(), "missing"),
        (lambda chain: shutil.rmtree(chain[0].path), "its base step-00000001 is missing"),
        (replace_base, "is not the checkpoint that it was made from"),
        (link_base, "its base step-00000001 is missing"),
    ],
)
def test_damage_anywhere_in_a_chain_is_found(make_chain, damage, message):
    chain = make_chain(1, 2, 3)
    damage(chain)
    for one in chain[1:]:
        faults = verify(one.path)
        assert any(message in fault.message for fault in faults), faults
        assert not any(str(one.path) not in fault.where and one is chain[0] for fault in faults)


def test_the_newest_one_that_is_whole_is_chosen(make_chain):
    chain = make_chain(1, 2, 3)
    flip(chain[2].path / "shard-00000.delta")
    selection = newest_valid(chain[0].path.parent)
    assert selection.checkpoint == chain[1]
    assert "checksum is not" in selection.reason


def test_a_damaged_base_is_told_once(make_chain):
    chain = make_chain(1, 2, 3)
    flip(chain[0].path / "shard-00000.safetensors")
    with pytest.raises(CheckpointError) as error:
        newest_valid(chain[0].path.parent)
    assert [problem.message.count("checksum is not") for problem in error.value.problems] == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["base"].update(name="../step-00000001"), "base.name"),
        (lambda d: d["base"].update(name="/etc"), "base.name"),
        (lambda d: d["base"].update(digest="0"), "base.digest"),
        (lambda d: d.update(base=7), "base"),
        (lambda d: d.pop("base"), "schema"),
        (lambda d: (d.pop("base"), d.update(schema=1)), "base is missing"),
        (lambda d: d["tensors"]["w"]["pieces"][0].update(blocks=[1, 2]), "are 2, not 1"),
        (lambda d: d["tensors"]["w"]["pieces"][0].update(blocks=[4001]), "larger than what it stands for"),
        (lambda d: d["tensors"]["w"]["pieces"][0].update(blocks=[-1]), "not a whole number"),
        (lambda d: d["tensors"]["w"]["pieces"][0].update(blocks=[1]), "do not hold 1000 elements"),
        (lambda d: d["tensors"]["w"]["pieces"][0].pop("blocks"), "do not hold 1000 elements"),
        (lambda d: d["shards"][0].update(file="../shard-00000.delta"), "file"),
    ],
)
def test_a_manifest_of_an_enemy_is_refused(make_chain, change, message):
    chain = make_chain(1, 2)
    rewritten(chain[1].path / "manifest.json", change)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(chain[1].path)


def test_a_chain_that_bites_its_tail_is_refused(make_chain):
    chain = make_chain(1, 2)
    rewritten(
        chain[1].path / "manifest.json",
        lambda d: d["base"].update(name="step-00000002", digest=d["digest"]),
    )
    [fault] = verify(chain[1].path, checksums=False)
    assert "is not the checkpoint that it was made from" in fault.message


def test_pruning_never_breaks_a_chain(make_chain, tmp_path):
    chain = make_chain(1, 2, 3)
    root = tmp_path / "checkpoints"
    assert outdated(root, 1) == [], "no full one follows"
    [full], newer = make_chain(4), make_chain(5, 6)
    assert prune(root, 1, protect=lambda one: one.step == 2) == [full, chain[2]]
    assert list_checkpoints(root) == [newer[1], newer[0], chain[1], chain[0]]
    assert all(verify(one.path) == [] for one in list_checkpoints(root))
