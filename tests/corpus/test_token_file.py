"""Token files: windows, bounds, and the Megatron-LM format, read by an independent reader written from its
description."""

from __future__ import annotations

import os
import re
import struct
from itertools import pairwise

import numpy as np
import pytest

from llmtrain.corpus import token_file
from llmtrain.corpus.token_file import TokenFile, token_dtype
from llmtrain.errors import CorpusError


def write_megatron(prefix, documents, dtype="<u2", code=8):
    """An index and data file, field by field; each document is a list of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    data = np.concatenate([np.array(sequence, dtype) for sequence in sequences] or [np.zeros(0, dtype)])
    prefix.with_suffix(".bin").write_bytes(data.tobytes())
    lengths = [len(sequence) for sequence in sequences]
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    bounds = np.cumsum([0] + [len(document) for document in documents])
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00")
        stream.write(struct.pack("<Q", 1))
        stream.write(struct.pack("<B", code))
        stream.write(struct.pack("<QQ", len(lengths), len(bounds)))
        stream.write(np.array(lengths, "<i4").tobytes())
        stream.write(np.array(pointers, "<i8").tobytes())
        stream.write(np.array(bounds, "<i8").tobytes())
    return prefix


def read_megatron(prefix):
    """All documents, as lists of sequences of ints: a second reader, which shares no code with the first."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", index, 9) == (1,)
    (code,) = struct.unpack_from("<B", index, 17)
    count, bound_count = struct.unpack_from("<QQ", index, 18)
    dtype = {1: "<u1", 8: "<u2", 4: "<i4"}[code]
    place = 34
    lengths = np.frombuffer(index, "<i4", count, place)
    pointers = np.frombuffer(index, "<i8", count, place + 4 * count)
    bounds = np.frombuffer(index, "<i8", bound_count, place + 12 * count)
    assert len(index) == place + 12 * count + 8 * bound_count
    data = prefix.with_suffix(".bin").read_bytes()
    sequences = [np.frombuffer(data, dtype, n, p).tolist() for n, p in zip(lengths, pointers, strict=True)]
    return [sequences[low:high] for low, high in pairwise(bounds)]


DOCUMENTS = [[[5, 6, 7]], [[8], [9, 10, 11, 12]], [[13, 14]]]


@pytest.fixture
def prefix(tmp_path):
    return write_megatron(tmp_path / "text", DOCUMENTS)


def test_windows_share_one_token_with_their_neighbour(prefix):
    tokens = TokenFile.open(prefix)
    assert (tokens.tokens, tokens.documents, tokens.head.sequences) == (10, 3, 4)
    assert tokens.windows(3) == 3
    found = [tokens.window(index, 3).tolist() for index in range(3)]
    assert found == [[5, 6, 7, 8], [8, 9, 10, 11], [11, 12, 13, 14]]
    assert tokens.window(0, 9).tolist() == list(range(5, 15))
    assert tokens.window(0, 3).dtype == np.int64
    assert tokens.windows(10) == 0
    for index in (-1, 3):
        with pytest.raises(IndexError, match=r"is outside 0\.\.2"):
            tokens.window(index, 3)


def test_document_bounds_are_token_positions(prefix):
    assert TokenFile.open(prefix).document_bounds().tolist() == [0, 3, 8, 10]


@pytest.mark.parametrize(("dtype", "code"), [("<u1", 1), ("<i4", 4), ("<i8", 5), ("<u2", 8), ("<i2", 3)])
def test_all_integer_dtypes_are_read(tmp_path, dtype, code):
    prefix = write_megatron(tmp_path / "text", DOCUMENTS, dtype, code)
    assert TokenFile.open(prefix).window(2, 3).tolist() == [11, 12, 13, 14]


def test_an_index_with_modes_is_read(prefix):
    """Multimodal Megatron-LM indices end in one byte a sequence."""
    with prefix.with_suffix(".idx").open("ab") as stream:
        stream.write(bytes(4))
    assert TokenFile.open(prefix).tokens == 10


def test_beyond_two_to_the_31_tokens(tmp_path):
    """A sparse file of 5 GB (2.5e9 tokens): positions need more than 32 bits."""
    total = 2_500_000_000
    prefix = tmp_path / "text"
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(2 * total)
        stream.seek(2 * (total - 4))
        stream.write(np.array([1, 2, 3, 4], "<u2").tobytes())
    lengths = np.array([1_250_000_000] * 2, "<i4")
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(token_file.HEAD.pack(token_file.MAGIC, 1, 8, 2, 3))
        stream.write(lengths.tobytes())
        stream.write(np.array([0, 2_500_000_000], "<i8").tobytes())
        stream.write(np.array([0, 1, 2], "<i8").tobytes())
    tokens = TokenFile.open(prefix)
    assert tokens.tokens == total
    assert tokens.read(total - 4, 4).tolist() == [1, 2, 3, 4]
    windows = tokens.windows(3)
    assert windows == (total - 1) // 3
    assert tokens.window(windows - 1, 3).tolist() == [1, 2, 3, 4] if total % 3 == 1 else True
    assert tokens.document_bounds().tolist() == [0, 1_250_000_000, total]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.with_suffix(".bin").unlink(), r"text\.bin: missing"),
        (lambda p: p.with_suffix(".idx").unlink(), r"text\.idx: missing"),
        (lambda p: os.truncate(p.with_suffix(".bin"), 19), r"text\.bin: has 19 bytes, its index says 20"),
        (lambda p: os.truncate(p.with_suffix(".bin"), 0), "has 0 bytes, its index says 20"),
        (lambda p: os.truncate(p.with_suffix(".idx"), 80), "instead of 114: it was cut off"),
        (lambda p: os.truncate(p.with_suffix(".idx"), 10), "is not an index of a token file"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"x" * 200), "is not an index of a token file"),
        (
            lambda p: p.with_suffix(".idx").write_bytes(
                p.with_suffix(".idx").read_bytes().replace(b"\x08", b"\x07", 1)
            ),
            "version 1 and dtype code 7, which cannot be read",
        ),
        (
            lambda p: p.with_suffix(".idx").write_bytes(
                p.with_suffix(".idx").read_bytes()[:18]
                + b"\xff" * 16
                + p.with_suffix(".idx").read_bytes()[34:]
            ),
            "it was cut off",
        ),
        (
            lambda p: (p.with_suffix(".bin").unlink(), p.with_suffix(".bin").mkdir()),
            "text.bin: ",
        ),
    ],
)
def test_torn_files_are_named(prefix, damage, message):
    damage(prefix)
    with pytest.raises(CorpusError) as raised:
        TokenFile.open(prefix)
    assert re.search(message, raised.value.text())


def test_bounds_outside_the_sequences_are_refused(prefix):
    index = bytearray(prefix.with_suffix(".idx").read_bytes())
    index[-8:] = struct.pack("<q", 99)
    prefix.with_suffix(".idx").write_bytes(index)
    with pytest.raises(CorpusError, match="document bounds outside its sequences"):
        TokenFile.open(prefix).document_bounds()


def test_a_file_that_shrinks_while_it_is_read(prefix):
    tokens = TokenFile.open(prefix)
    os.truncate(prefix.with_suffix(".bin"), 10)
    assert tokens.window(0, 3).tolist() == [5, 6, 7, 8]
    with pytest.raises(CorpusError, match="ends at byte 10, before its index does"):
        tokens.window(1, 3)


def test_a_failing_read_is_tried_again_and_then_named(prefix, monkeypatch):
    tokens = TokenFile.open(prefix)
    monkeypatch.setattr(token_file, "FIRST_WAIT", 0.001)
    real, left = os.pread, [2]

    def flaky(descriptor, size, offset):
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return real(descriptor, size, offset)

    monkeypatch.setattr(token_file.os, "pread", flaky)
    assert tokens.window(0, 3).tolist() == [5, 6, 7, 8]
    left[0] = 99
    with pytest.raises(CorpusError, match="cannot be read after 4 tries: Input/output error") as raised:
        tokens.window(0, 3)
    assert str(prefix.with_suffix(".bin")) in raised.value.text()
    assert left[0] == 95


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32")]
)
def test_the_smallest_dtype_is_chosen(vocab, dtype):
    assert token_dtype(vocab) == dtype


@pytest.mark.parametrize("vocab", [0, -1, 2**31 + 1])
def test_a_vocabulary_that_cannot_be_stored(vocab):
    with pytest.raises(ValueError, match="cannot be stored"):
        token_dtype(vocab)


@pytest.mark.parametrize(
    ("first", "count", "expected", "bounds"),
    [
        (0, 1, [5, 6, 7], [0, 3]),
        (1, 2, [8, 9, 10, 11, 12, 13, 14], [0, 5, 7]),
        (2, 1, [13, 14], [0, 2]),
        (3, 0, [], [0]),
    ],
)
def test_a_view_of_some_documents(prefix, first, count, expected, bounds):
    view = TokenFile.open(prefix, first, count)
    assert view.tokens == len(expected)
    assert view.read(0, view.tokens).tolist() == expected
    assert view.document_bounds().tolist() == bounds
    if len(expected) > 3:
        assert view.window(1, 2).tolist() == expected[2:5]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_name_with_dots_and_any_suffix(tmp_path, suffix):
    for name in ("bin", "idx"):
        write_megatron(tmp_path / "x", DOCUMENTS).with_suffix(f".{name}").rename(
            tmp_path / f"my.v1.text.{name}"
        )
    assert TokenFile.open(tmp_path / f"my.v1.text{suffix}").tokens == 10


def test_more_documents_than_there_are(prefix):
    with pytest.raises(CorpusError, match=r"holds 3 documents, not 1 \+ 3"):
        TokenFile.open(prefix, 1, 3)
