"""Any layout loads any other's checkpoint, bit for bit, and the files are ordinary safetensors."""

from __future__ import annotations

import random
import resource

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import ALONE, Piece, whole
from llmtrain.engine.checkpoint.save import save_checkpoint, save_shard
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import CheckpointInfo, begin_save, commit_save, read_manifest, verify
from tests.support.layouts import pieces_of, random_layout, random_state, save_as

pytestmark = pytest.mark.engine


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_layout_loads_any_other(tmp_path_factory, seed):
    rng = random.Random(seed)
    state = random_state(rng)
    saved = save_as(tmp_path_factory.mktemp("c"), random_layout(rng, state), state, 3)
    assert verify(saved.path) == []
    other = random_layout(rng, state)
    for rank in range(other.world_size):
        wanted, found = pieces_of(other, state, rank), pieces_of(other, state, rank, empty=True)
        load_pieces(saved.path, found)
        for expected, piece in zip(wanted, found, strict=True):
            assert torch.equal(expected.data, piece.data), (seed, rank, piece.key)


def test_shards_are_ordinary_safetensors(tmp_path):
    from safetensors import safe_open

    rng = random.Random(5)
    state = random_state(rng, 9)
    layout = random_layout(rng, state)
    saved = save_as(tmp_path, layout, state, 1)
    manifest = read_manifest(saved.path)
    stored = 0
    for rank, shard in enumerate(manifest.shards):
        content = (saved.path / shard.file).read_bytes()
        with safe_open(saved.path / shard.file, "pt") as reader:
            for piece in pieces_of(layout, state, rank):
                if piece.owner and piece.data.numel():
                    assert torch.equal(reader.get_tensor(piece.key), piece.data)
                    entry = next(p for p in manifest.tensors[piece.key].pieces if p.shard == rank)
                    assert content[entry.begin : entry.end] == piece.data.view(torch.uint8).numpy().tobytes()
                    stored += 1
    assert stored >= len(state)


def test_a_view_inside_a_larger_buffer_is_saved_and_filled(tmp_path):
    """The engine's pieces are slices of one flat bucket: offsets in the storage must not matter."""
    bucket = torch.arange(100.0)
    piece = Piece("a", (5, 4), (0, 1), (5, 2), 3, bucket[40:45])
    rest = [
        Piece("a", (5, 4), (0, 1), (5, 2), 0, bucket[10:13]),
        Piece("a", (5, 4), (0, 1), (5, 2), 8, bucket[60:62]),
        Piece("a", (5, 4), (0, 0), (5, 1), 0, bucket[80:85]),
        Piece("a", (5, 4), (0, 3), (5, 1), 0, bucket[85:90]),
    ]
    info = CheckpointInfo(run_id="r", recipe_digest="", step=1, consumed_samples=0)
    saved = save_checkpoint(tmp_path, info, [piece, *rest], ALONE).checkpoint
    target = torch.zeros(50)
    filled = Piece("a", (5, 4), (0, 0), (5, 4), 2, target[20:37])
    load_pieces(saved.path, [filled])
    reference = torch.zeros(5, 4)
    reference[:, 1:3] = torch.cat([bucket[10:13], bucket[40:45], bucket[60:62]]).view(5, 2)
    reference[:, 0], reference[:, 3] = bucket[80:85], bucket[85:90]
    assert torch.equal(target[20:37], reference.view(-1)[2:19])
    assert not target[:20].any()
    assert not target[37:].any()


def _saved(tmp_path, tensor=None):
    info = CheckpointInfo(run_id="r", recipe_digest="", step=1, consumed_samples=0)
    saved = save_checkpoint(
        tmp_path, info, [whole("w", torch.zeros(4, 6) if tensor is None else tensor)], ALONE
    )
    return saved.checkpoint


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (whole("v", torch.zeros(4, 6)), "tensor 'v' is not in it"),
        (whole("w", torch.zeros(6, 4)), r"tensor 'w' has shape \[4, 6\] in it, but \[6, 4\] in this model"),
        (whole("w", torch.zeros(4, 6, dtype=torch.float16)), "tensor 'w' is F32 in it, but F16 in this run"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, wanted, message):
    saved = _saved(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_pieces(saved.path, [wanted])


def test_a_gap_is_refused_at_the_commit_and_named(tmp_path):
    temporary = begin_save(tmp_path, 1)
    save_shard(temporary, 0, [Piece("w", (4, 6), (0, 0), (4, 6), 0, torch.zeros(20))])
    info = CheckpointInfo(run_id="r", recipe_digest="", step=1, consumed_samples=0)
    with pytest.raises(
        CheckpointError, match=r"tensor 'w': elements 20\.\.24 of box \[0:4, 0:6\] are missing"
    ):
        commit_save(temporary, info, 1)
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 6), (0, 0), (4, 7), 0, torch.zeros(3)), "box 0:7 is outside 0:6 on axis 1"),
        (((4, 6), (0, 0), (4, 6), 22, torch.zeros(3)), r"elements 22\.\.25 are outside a box of 24 elements"),
        (((4, 6), (0,), (4, 6), 0, torch.zeros(3)), "differ in length"),
        (((4, 6), (0, 0), (4, 6), 0, torch.zeros(3, 1)), "must be 1-D and contiguous"),
        (((4, 6), (0, 0), (4, 6), 0, torch.zeros(6)[::2]), "must be 1-D and contiguous"),
        (((4, 6), (0, 0), (4, 6), 0, torch.zeros(3, dtype=torch.complex64)), "cannot be stored"),
    ],
)
def test_impossible_pieces_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Piece("w", *arguments)


def test_a_load_reads_only_what_it_needs(tmp_path):
    """A rank that wants a sliver of a large tensor must not take the tensor into memory."""
    saved = _saved(tmp_path, torch.arange(16 << 20, dtype=torch.float32).view(4096, 4096))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    piece = Piece("w", (4096, 4096), (0, 0), (16, 4096), 0, torch.zeros(16 * 4096))
    column = Piece("w", (4096, 4096), (0, 7), (4096, 1), 5, torch.zeros(100))
    stats = load_pieces(saved.path, [piece, column])
    assert stats.bytes == 4 * (16 * 4096 + 100)
    assert torch.equal(piece.data, torch.arange(16 * 4096.0))
    assert torch.equal(column.data, torch.arange(5, 105).float() * 4096 + 7)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 24 << 10, "kibibytes"
