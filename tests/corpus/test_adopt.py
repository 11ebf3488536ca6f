"""Megatron-LM corpora, used where they lie: files of another writer are read, and ours are read by another
reader."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from llmtrain.cli.main import run
from llmtrain.config.data import DataConfig
from llmtrain.corpus.preparation.prepare import prepare, prepare_folder
from llmtrain.corpus.prepared import open_prepared
from llmtrain.errors import CorpusError, InputError, UsageError
from tests.corpus.test_token_file import write_megatron


@pytest.fixture
def corpus_of_another(tmp_path):
    """100 documents of 10 tokens each: document n holds n everywhere."""
    return write_megatron(tmp_path / "text_document", [[[n] * 4, [n] * 6] for n in range(100)])


def test_the_last_documents_are_held_out_and_nothing_is_copied(tmp_path, corpus_of_another):
    data = DataConfig(corpus=str(corpus_of_another), validation_fraction=0.05)
    corpus = prepare(data, tmp_path / "storage")
    assert [path.name for path in corpus.folder.iterdir()] == ["corpus.json"]
    assert (corpus.train.tokens, corpus.validation.tokens) == (950, 50)
    assert corpus.train.window(0, 20).tolist() == [0] * 10 + [1] * 10 + [2]
    assert corpus.validation.window(0, 20).tolist() == [95] * 10 + [96] * 10 + [97]
    assert corpus.manifest.train.max_token == 94
    assert corpus.manifest.validation.max_token == 99
    corpus.verify()
    again = prepare(data, tmp_path / "storage")
    assert (again.folder, again.digest) == (corpus.folder, corpus.digest)
    assert open_prepared(corpus.folder, digest=corpus.digest).train.tokens == 950


@pytest.mark.parametrize(("fraction", "held_out"), [(0, 0), (0.001, 1), (0.01, 1), (0.25, 25), (0.999, 99)])
def test_the_fraction_is_of_tokens(tmp_path, corpus_of_another, fraction, held_out):
    corpus = prepare(
        DataConfig(corpus=str(corpus_of_another), validation_fraction=fraction), tmp_path / "storage"
    )
    assert corpus.manifest.validation.documents == held_out
    assert corpus.train.tokens + corpus.validation.tokens == 1000


def test_the_command_line_adopts_too(tmp_path, corpus_of_another, capsys):
    out = str(tmp_path / "out")
    assert run(["data", "prepare", str(corpus_of_another) + ".bin", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corpus"]["train"]["prefix"] == str(corpus_of_another)


def test_a_token_beyond_the_vocabulary_is_found_before_training(tmp_path):
    prefix = write_megatron(tmp_path / "text", [[[1, 2, 300]]])
    with pytest.raises(UsageError, match="holds token id 300, but tokenizer bytes has 256 tokens"):
        prepare(DataConfig(corpus=str(prefix)), tmp_path / "storage")


def test_negative_tokens_are_damage(tmp_path):
    prefix = write_megatron(tmp_path / "text", [[[1, 2, -3]]], "<i4", 4)
    with pytest.raises(InputError, match="holds the negative token id -3"):
        prepare(DataConfig(corpus=str(prefix)), tmp_path / "storage")


def test_a_torn_corpus_is_named(tmp_path, corpus_of_another):
    os.truncate(corpus_of_another.with_suffix(".bin"), 1000)
    with pytest.raises(InputError, match="has 1000 bytes, its index says 2000"):
        prepare(DataConfig(corpus=str(corpus_of_another)), tmp_path / "storage")


def test_a_corpus_that_changed_is_noticed(tmp_path, corpus_of_another):
    corpus = prepare(DataConfig(corpus=str(corpus_of_another)), tmp_path / "storage")
    data = corpus_of_another.with_suffix(".bin")
    content = np.fromfile(data, "<u2")
    content[500] = 7
    content.tofile(data)
    with pytest.raises(CorpusError, match="is damaged"):
        corpus.verify()
    later = prepare(DataConfig(corpus=str(corpus_of_another)), tmp_path / "storage")
    assert later.digest != corpus.digest


def test_it_must_be_the_only_source(tmp_path, corpus_of_another, jsonl):
    with pytest.raises(UsageError, match="an indexed corpus must be the only source"):
        prepare_folder([str(jsonl), str(corpus_of_another)], tmp_path / "out")


def test_what_we_write_can_be_adopted(tmp_path, jsonl):
    ours = prepare_folder([str(jsonl)], tmp_path / "ours", validation_fraction=0)
    corpus = prepare(
        DataConfig(corpus=str(ours.folder / "train"), validation_fraction=0), tmp_path / "storage"
    )
    assert corpus.train.tokens == ours.train.tokens
    assert corpus.train.document_bounds().tolist() == ours.train.document_bounds().tolist()
    assert corpus.manifest.train.bin_sha256 == ours.manifest.train.bin_sha256
