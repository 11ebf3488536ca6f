"""Compressed and columnar inputs: the same documents as from plain jsonl, and torn files named."""

from __future__ import annotations

import gzip
import io
import json
import sys

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from llmtrain.corpus.preparation.prepare import prepare_folder
from llmtrain.corpus.preparation.sources import cut_into_parts, find_files
from llmtrain.errors import InputError, UsageError
from tests.corpus.conftest import paragraph
from tests.corpus.test_prepare import texts

EXPECTED = [paragraph(n) for n in range(300)]


def zst(content, frames=1):
    step = -(-len(content) // frames)
    return b"".join(
        zstandard.ZstdCompressor().compress(content[start : start + step])
        for start in range(0, len(content), step)
    )


def streamed_zst(content):
    """As `zstd < file` writes it: without the content's size in the header."""
    target = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(target, closefd=False) as stream:
        stream.write(content)
    return target.getvalue()


PACKERS = {
    "lines.jsonl.gz": gzip.compress,
    "LINES.JSONL.GZ": gzip.compress,
    "two.ndjson.gz": lambda content: gzip.compress(content[:1000]) + gzip.compress(content[1000:]),
    "lines.jsonl.zst": zst,
    "many.jsonl.zst": lambda content: zst(content, 7),
    "stream.jsonl.zst": streamed_zst,
}


@pytest.mark.parametrize("name", PACKERS)
def test_compressed_lines(tmp_path, jsonl, name):
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(PACKERS[name](jsonl.read_bytes()))
    for source, out in ((path, "file"), (path.parent, "folder")):
        corpus = prepare_folder([str(source)], tmp_path / out, validation_fraction=0)
        assert texts(corpus, "train") == EXPECTED


@pytest.mark.parametrize(("name", "pack"), [("a.txt.gz", gzip.compress), ("a.txt.zst", zst)])
def test_compressed_text(tmp_path, name, pack):
    content = "\n\n".join(EXPECTED * 10)
    (tmp_path / name).write_bytes(pack(content.encode()))
    corpus = prepare_folder([str(tmp_path / name)], tmp_path / "out", validation_fraction=0)
    assert texts(corpus, "train") == [content]


def test_a_compressed_file_is_one_part(tmp_path, jsonl):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    (tmp_path / "in" / "b.jsonl").write_bytes(jsonl.read_bytes())
    parts = list(cut_into_parts(find_files(str(tmp_path / "in")), 1000))
    ranges = [(part.file.name, part.begin, part.end == part.file.size) for ranges in parts for part in ranges]
    assert ranges[0] == ("a.jsonl.gz", 0, True)
    assert len(ranges) > 10


def write_parquet(path, values, kind=None, **options):
    table = pyarrow.table(
        {"id": list(range(len(values))), "text": pyarrow.array(values, kind or pyarrow.string())}
    )
    parquet.write_table(table, path, **options)


@pytest.mark.parametrize(("groups", "compression"), [(300, "snappy"), (17, "zstd"), (1, "none")])
def test_parquet(tmp_path, groups, compression, monkeypatch):
    write_parquet(tmp_path / "a.parquet", EXPECTED, row_group_size=groups, compression=compression)
    whole = prepare_folder([str(tmp_path / "a.parquet")], tmp_path / "whole", validation_fraction=0)
    assert texts(whole, "train") == EXPECTED
    monkeypatch.setattr(cut_into_parts, "__defaults__", (3000,))
    cut = prepare_folder([str(tmp_path / "a.parquet")], tmp_path / "cut", validation_fraction=0, workers=1)
    assert cut.digest == whole.digest


def test_parquet_with_nulls_and_large_strings(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one", None, "", "two"], pyarrow.large_string())
    corpus = prepare_folder([str(tmp_path / "a.parquet")], tmp_path / "out", validation_fraction=0)
    assert texts(corpus, "train") == ["one", "two"]
    assert corpus.manifest.empty_documents == 2


def torn(content):
    return content[: len(content) // 2]


def flipped(content):
    """With a wrong checksum at the end of the gzip stream."""
    return content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]


def parquet_bytes(content):
    target = io.BytesIO()
    lines = [json.loads(line)["text"] for line in content.splitlines()]
    write_parquet(target, lines)
    return target.getvalue()


@pytest.mark.parametrize(
    ("name", "pack", "message"),
    [
        ("a.jsonl.gz", lambda c: torn(gzip.compress(c)), "is not a whole gzip file"),
        ("a.jsonl.gz", lambda c: flipped(gzip.compress(c)), "is not a whole gzip file"),
        ("a.jsonl.gz", lambda c: c, "is not a whole gzip file"),
        ("a.jsonl.zst", lambda c: torn(zst(c)), "is not a whole zstd file: it ends inside a frame"),
        ("a.jsonl.zst", lambda c: zst(c)[:-1], "is not a whole zstd file: it ends inside a frame"),
        ("a.jsonl.zst", lambda c: c, "is not a whole zstd file"),
        ("a.parquet", lambda c: torn(parquet_bytes(c)), "is not a whole parquet file"),
        ("a.parquet", lambda c: c, "is not a whole parquet file"),
    ],
)
def test_torn_inputs_are_named(tmp_path, jsonl, name, pack, message):
    (tmp_path / name).write_bytes(pack(jsonl.read_bytes()))
    with pytest.raises(InputError) as raised:
        prepare_folder([str(tmp_path / name)], tmp_path / "out")
    assert message in raised.value.text()
    assert str(tmp_path / name) in raised.value.text()
    assert not list(tmp_path.glob("*out*")), "nothing is left behind"


def test_a_bad_line_of_a_compressed_file_has_its_number(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": 1}\n'))
    with pytest.raises(UsageError) as raised:
        prepare_folder([str(tmp_path / "a.jsonl.gz")], tmp_path / "out")
    assert "a.jsonl.gz:3: field 'text' is not a text but int" in raised.value.text()


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [([1, 2], pyarrow.int64(), "column 'text' holds int64, not text")],
)
def test_a_wrong_parquet_column(tmp_path, values, kind, message):
    write_parquet(tmp_path / "a.parquet", values, kind)
    with pytest.raises(UsageError) as raised:
        prepare_folder([str(tmp_path / "a.parquet")], tmp_path / "out")
    assert message in raised.value.text()
    parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError) as raised:
        prepare_folder([str(tmp_path / "b.parquet")], tmp_path / "out")
    assert "has no column 'text'\n  hint: columns: body, id" in raised.value.text()


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as raised:
        prepare_folder([str(tmp_path / name)], tmp_path / "out")
    assert f"needs the package {package}" in raised.value.text()
    assert "pip install 'llmtrain[data]'" in raised.value.text()
