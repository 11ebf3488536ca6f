"""Training a tokenizer: lossless, compressing, the same every time, and usable by prepare."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.cli.main import run
from llmtrain.corpus.preparation.prepare import prepare_folder
from llmtrain.corpus.preparation.train_tokenizer import train_tokenizer
from llmtrain.errors import UsageError
from tests.corpus.conftest import paragraph


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": paragraph(n)}) + "\n" for n in range(300)))
    assert train_tokenizer([str(folder / "a.jsonl")], folder / "t", vocab=400) == 400
    return folder


def test_prepare_takes_the_folder(trained, tmp_path):
    source = str(trained / "a.jsonl")
    corpus = prepare_folder([source], tmp_path / "bpe", tokenizer=str(trained / "t"), validation_fraction=0)
    plain = prepare_folder([source], tmp_path / "bytes", validation_fraction=0)
    assert corpus.vocab == 400
    assert corpus.manifest.tokenizer.separator == 0
    assert corpus.train.tokens < plain.train.tokens / 2


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
def test_every_text_comes_back(trained, text):
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(trained / "t" / "tokenizer.json"))
    assert library.decode(library.encode(text).ids) == text


def test_the_same_text_gives_the_same_tokenizer(trained, tmp_path):
    train_tokenizer([str(trained / "a.jsonl")], tmp_path, vocab=400)
    assert (tmp_path / "tokenizer.json").read_bytes() == (trained / "t" / "tokenizer.json").read_bytes()


def test_held_out_texts_are_left_out_and_limits_hold(trained, tmp_path):
    source, seen = str(trained / "a.jsonl"), []
    train_tokenizer([source], tmp_path / "all", vocab=400, validation_fraction=0)
    train_tokenizer([source], tmp_path / "part", vocab=400, validation_fraction=0.5)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("all", "part"))
    assert first != second
    train_tokenizer(
        [source], tmp_path / "few", vocab=300, most_bytes=2000, progress=lambda *at: seen.append(at)
    )
    assert seen == [(2000, 2000)]


def test_the_command(trained, tmp_path, capsys):
    call = [
        "data",
        "tokenizer",
        "train",
        str(trained / "a.jsonl"),
        "--vocab",
        "300",
        "--out",
        str(tmp_path / "t"),
    ]
    assert run([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"]["vocab"] == 300
    assert run([*call, "--most", "5 KB"]) == 0
    assert capsys.readouterr().out.endswith("tokenizer.json: 300 tokens\n")
    assert run([*call, "--most", "5 parsecs"]) == 2
    assert "--most: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "vocab", "message"),
    [
        ('{"text": "a"}\n', 256, "a byte-level vocabulary has at least 257 tokens, not 256"),
        ('{"text": "a"}\n', 300, "holds too little text to learn a single merge"),
    ],
)
def test_what_cannot_be_trained(tmp_path, content, vocab, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UsageError, match=message):
        train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "t", vocab=vocab)
    assert not (tmp_path / "t").exists()
