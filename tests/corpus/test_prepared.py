"""Prepared corpora: taken as they are, refused when damaged, never overwritten; full disks; memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from llmtrain.config.data import DataConfig
from llmtrain.corpus.preparation.prepare import prepare, prepare_folder
from llmtrain.corpus.prepared import open_prepared
from llmtrain.errors import CorpusError, UsageError
from tests.corpus.conftest import paragraph


def test_a_prepared_folder_is_taken_as_it_is(tmp_path, jsonl, tokenizer_json):
    corpus = prepare_folder([str(jsonl)], tmp_path / "mine")
    taken = prepare(DataConfig(corpus=str(tmp_path / "mine")), tmp_path / "storage")
    assert taken.digest == corpus.digest
    assert not (tmp_path / "storage").exists()
    with pytest.raises(
        UsageError, match=r"was prepared with tokenizer bytes, but data\.tokenizer is .*, which differs"
    ):
        prepare(
            DataConfig(corpus=str(tmp_path / "mine"), tokenizer=str(tokenizer_json)), tmp_path / "storage"
        )


def test_another_corpus_in_the_way_is_not_overwritten(tmp_path, jsonl):
    corpus = prepare_folder([str(jsonl)], tmp_path / "out")
    assert prepare_folder([str(jsonl)], tmp_path / "out").digest == corpus.digest
    with pytest.raises(UsageError, match="holds a corpus of other sources, tokenizer or validation fraction"):
        prepare_folder([str(jsonl)], tmp_path / "out", validation_fraction=0.5)
    (tmp_path / "full").mkdir()
    with pytest.raises(UsageError, match="exists and is not a prepared corpus"):
        prepare_folder([str(jsonl)], tmp_path / "full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab": 100, "sequence": 8, "validation": True}, "holds token id 1"),
        (
            {"vocab": 256, "sequence": 10**9, "validation": False},
            "too few for one window of 1000000000 + 1",
        ),
        ({"vocab": 256, "sequence": 8000, "validation": True}, "validation tokens, too few for one window"),
    ],
)
def test_a_model_that_does_not_fit(tmp_path, jsonl, arguments, message):
    corpus = prepare_folder([str(jsonl)], tmp_path / "out", validation_fraction=0.02)
    corpus.check_fits(vocab=256, sequence=8, validation=True)
    with pytest.raises(UsageError) as raised:
        corpus.check_fits(**arguments)
    assert message in raised.value.text()


SUFFIXES = (".bin", ".idx")


def edit_manifest(folder, change):
    path = folder / "corpus.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "corpus.json").unlink(), "this is not a prepared corpus"),
        (lambda f: (f / "corpus.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "corpus.json").write_text("[]"), "is not a corpus manifest of schema 1"),
        (lambda f: edit_manifest(f, lambda d: d.update(schema=9)), "is not a corpus manifest of schema 1"),
        (lambda f: edit_manifest(f, lambda d: d["train"].update(tokens=1)), "was changed or damaged"),
        (lambda f: os.truncate(f / "train.bin", 100), "has 100 bytes, its index says"),
        (lambda f: (f / "validation.idx").unlink(), "validation.idx: missing"),
        (lambda f: [(f / f"train{s}").write_bytes((f / f"validation{s}").read_bytes()) for s in SUFFIXES],
         "holds 30 documents, not 0 + 270"),
    ],
)  # fmt: skip
def test_a_damaged_corpus_is_named(tmp_path, jsonl, damage, message):
    corpus = prepare_folder([str(jsonl)], tmp_path / "out", validation_fraction=0.1)
    damage(corpus.folder)
    with pytest.raises(CorpusError) as raised:
        open_prepared(corpus.folder)
    assert message in raised.value.text()


def test_a_flipped_bit_is_found_before_training(tmp_path, jsonl):
    corpus = prepare(DataConfig(corpus=str(jsonl)), tmp_path / "storage")
    content = bytearray((corpus.folder / "train.bin").read_bytes())
    content[1234] ^= 1
    (corpus.folder / "train.bin").write_bytes(content)
    with pytest.raises(CorpusError, match="is damaged: its SHA-256"):
        prepare(DataConfig(corpus=str(jsonl)), tmp_path / "storage")


def test_another_digest_than_the_runs_is_refused(tmp_path, jsonl):
    corpus = prepare_folder([str(jsonl)], tmp_path / "out")
    assert open_prepared(corpus.folder, digest=corpus.digest).digest == corpus.digest
    moved = jsonl.rename(jsonl.with_name("elsewhere.jsonl"))
    assert prepare_folder([str(moved)], tmp_path / "again").digest == corpus.digest
    assert prepare_folder([str(moved)], tmp_path / "other", validation_fraction=0.5).digest != corpus.digest
    with pytest.raises(CorpusError, match="but the run was started with 0000"):
        open_prepared(corpus.folder, digest="0" * 64)


def test_a_full_disk_is_an_error_and_goes_on_later(tmp_path, jsonl, monkeypatch):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(CorpusError, match="cannot prepare: File too large"):
            prepare_folder([str(jsonl)], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()
    assert prepare_folder([str(jsonl)], tmp_path / "out").train.tokens > 10_000


def test_memory_stays_bounded(tmp_path):
    """40 MB of input in one document a line: the peak grows by less than a third of that."""
    path = tmp_path / "big.jsonl"
    with path.open("w") as stream:
        for n in range(4000):
            stream.write(json.dumps({"text": paragraph(n) * 120}) + "\n")
    assert path.stat().st_size > 30 << 20
    code = (
        "import resource,sys;from pathlib import Path\n"
        "from llmtrain.corpus.preparation.prepare import prepare_folder\n"
        "before=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "prepare_folder([sys.argv[1]],Path(sys.argv[2]),workers=1)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 25 << 10, "kibibytes"
