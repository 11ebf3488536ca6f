"""Preparing: every kind of source and tokenizer, restarts, several processes at once, and clear errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.config.data import DataConfig
from llmtrain.corpus.preparation import sources
from llmtrain.corpus.preparation.documents import read_sections
from llmtrain.corpus.preparation.prepare import prepare, prepare_folder
from llmtrain.corpus.preparation.sources import SourceFile, cut_into_parts, find_files
from llmtrain.errors import UsageError
from tests.corpus.conftest import paragraph
from tests.corpus.test_token_file import read_megatron


def texts(corpus, split):
    """Documents of a byte-level corpus, through the independent reader."""
    documents = read_megatron(corpus.folder / split)
    joined = [bytes(token for sequence in document for token in sequence) for document in documents]
    assert all(text.endswith(b"\0") for text in joined)
    return [text[:-1].decode() for text in joined]


def test_jsonl_documents_go_to_exactly_one_split(tmp_path, jsonl):
    corpus = prepare_folder([str(jsonl)], tmp_path / "out", validation_fraction=0.1)
    train, validation = texts(corpus, "train"), texts(corpus, "validation")
    assert sorted(train + validation) == sorted(paragraph(n) for n in range(300))
    assert 10 < len(validation) < 60
    assert [text for text in map(paragraph, range(300)) if text in set(train)] == train, "order is kept"
    assert corpus.train.tokens == sum(len(text) + 1 for text in train)
    assert corpus.manifest.train.max_token < 128
    corpus.verify()


def test_equal_documents_are_never_on_both_sides(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps({"text": paragraph(n % 40)}) + "\n" for n in range(400)))
    corpus = prepare_folder([str(path)], tmp_path / "out", validation_fraction=0.3)
    train, validation = set(texts(corpus, "train")), set(texts(corpus, "validation"))
    assert train
    assert validation
    assert not train & validation


def test_the_standard_library_is_found_and_large_enough(tmp_path):
    corpus = prepare(DataConfig(), tmp_path)
    assert corpus.folder.parent == tmp_path
    assert corpus.train.tokens > 5_000_000
    assert corpus.validation.windows(128) >= 32
    assert corpus.vocab == 256
    again = prepare(DataConfig(), tmp_path)
    assert (again.folder, again.digest) == (corpus.folder, corpus.digest)
    assert any("class JSONDecoder" in text for text in texts(corpus, "train") + texts(corpus, "validation"))
    assert not [file for file in find_files("python-stdlib") if "site-packages" in file.name]


def test_a_single_text_file_is_split_inside(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(paragraph(n) for n in range(20_000)))
    corpus = prepare_folder([str(path)], tmp_path / "out", validation_fraction=0.02)
    train, validation = texts(corpus, "train"), texts(corpus, "validation")
    assert len(validation) > 5
    whole = path.read_text()
    assert sum(map(len, train)) + sum(map(len, validation)) == len(whole)
    assert all(text in whole for text in validation)
    assert 0.005 < sum(map(len, validation)) / len(whole) < 0.05


def test_a_folder_is_read_in_the_order_of_names(tmp_path, jsonl):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "1.txt").write_text("second")
    (folder / "a.md").write_text("first")
    (folder / "c.jsonl").write_text('{"text": "third"}\n')
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("no")
    corpus = prepare_folder([str(folder)], tmp_path / "out", validation_fraction=0)
    assert texts(corpus, "train") == ["first", "second", "third"]
    assert corpus.validation.tokens == 0
    more = prepare_folder([str(jsonl), str(folder)], tmp_path / "more", validation_fraction=0)
    assert texts(more, "train")[-3:] == ["first", "second", "third"]
    assert [source.files for source in more.manifest.sources] == [1, 3]


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"caf\xe9 \xff\n")
    (folder / "b.txt").write_text("caf\u00e9 \ufffd and a nul: \0")
    (folder / "c.txt").write_bytes(b"")
    corpus = prepare_folder([str(folder)], tmp_path / "out", validation_fraction=0)
    assert texts(corpus, "train") == ["caf\ufffd \ufffd\n", "caf\u00e9 \ufffd and a nul: "]
    assert corpus.manifest.undecodable_files == 1


def test_halves_of_surrogate_pairs_are_replaced_and_counted(tmp_path):
    lines = [r'{"text": "a\ud800b"}', r'{"text": "\u00e9 \ud83d\ude00"}']
    corpus = prepare_folder([line(tmp_path, "\n".join(lines))], tmp_path / "out", validation_fraction=0)
    assert texts(corpus, "train")[-1] == "\u00e9 \U0001f600"
    assert corpus.manifest.undecodable_files == 1


def test_a_hugging_face_tokenizer(tmp_path, jsonl, tokenizer_json):
    from tokenizers import Tokenizer

    corpus = prepare_folder(
        [str(jsonl)], tmp_path / "out", tokenizer=str(tokenizer_json), validation_fraction=0
    )
    library = Tokenizer.from_file(str(tokenizer_json))
    separator = library.token_to_id("<|endoftext|>")
    found = [
        [token for sequence in document for token in sequence]
        for document in read_megatron(corpus.folder / "train")
    ]
    assert found == [[*library.encode(paragraph(n)).ids, separator] for n in range(300)]
    assert corpus.train.dtype == np.uint16
    assert corpus.vocab == library.get_vocab_size()
    assert corpus.manifest.tokenizer.separator == separator
    assert corpus.manifest.train.max_token < corpus.vocab


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=30),
    size=st.integers(1, 200),
    kind=st.sampled_from(["text", "jsonl"]),
    section=st.integers(3, 100),
)
def test_any_cut_into_parts_gives_the_same_text(tmp_path_factory, lines, size, kind, section):
    path = tmp_path_factory.mktemp("cut") / "file"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    else:
        path.write_text("\n".join(lines), newline="")
    file = SourceFile(path, "file", kind, path.stat().st_size, section)
    parts = list(cut_into_parts([file], size))
    assert sum(part.end - part.begin for ranges in parts for part in ranges) == file.size
    sections = [piece for ranges in parts for part in ranges for piece in read_sections(part)]
    if kind == "jsonl":
        assert [piece.text for piece in sections] == lines
    else:
        assert "".join(piece.text for piece in sections) == "\n".join(lines)
        assert all(len(piece.text) <= section for piece in sections)


def test_workers_and_parts_do_not_change_the_result(tmp_path, jsonl, tokenizer_json, monkeypatch):
    alone = prepare_folder([str(jsonl)], tmp_path / "alone", tokenizer=str(tokenizer_json), workers=1)
    monkeypatch.setattr(sources.cut_into_parts, "__defaults__", (4000,))
    parallel = prepare_folder([str(jsonl)], tmp_path / "parallel", tokenizer=str(tokenizer_json), workers=2)
    assert parallel.digest == alone.digest
    assert (parallel.folder / "train.bin").read_bytes() == (alone.folder / "train.bin").read_bytes()
    assert (parallel.folder / "train.idx").read_bytes() == (alone.folder / "train.idx").read_bytes()


def test_progress_reaches_the_total(tmp_path, jsonl):
    seen = []
    prepare_folder([str(jsonl)], tmp_path / "out", progress=seen.append)
    assert seen[0].phase == "digest"
    steps = [step.done for step in seen if step.phase == "tokenise"]
    assert steps == sorted(steps)
    assert steps[-1] == jsonl.stat().st_size


def bad_tokenizer(tmp_path, content, name="tokenizer.json"):
    (tmp_path / name).write_text(content)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: ([str(p / "nothing.txt")], "bytes", 0.01), "nothing.txt: no such file or folder"),
        (lambda p: ([str(p)], "bytes", 0.01), "holds no text, jsonl or parquet file"),
        (lambda p: ([line(p, "")], "bytes", 0.01), "holds no text"),
        (lambda p: ([line(p, "\n\n")], "bytes", 0.01), "holds no text"),
        (lambda p: ([line(p, '{"text": ""}\n')], "bytes", 0.01), "holds no text"),
        (
            lambda p: ([line(p, '{"text": "a"}\n{"body": "b"}\n')], "bytes", 0.01),
            "l.jsonl:2: line has no field 'text'",
        ),
        (lambda p: ([line(p, '{"text": "a"}\n{"te')], "bytes", 0.01), "l.jsonl:2: line is not a JSON object"),
        (lambda p: ([line(p, "[1]\n")], "bytes", 0.01), "l.jsonl:1: line is not a JSON object, but a value"),
        (lambda p: ([line(p, "[" * 9999)], "bytes", 0.01), "l.jsonl:1: line is not a JSON object"),
        (lambda p: ([""], "bytes", 0.01), "a source has no name"),
        (lambda p: (["~nobody-here/x.txt"], "bytes", 0.01), "no such file or folder"),
        (
            lambda p: ([line(p, '\n\n{"text": 5}\n')], "bytes", 0.01),
            "l.jsonl:3: field 'text' is not a text but int",
        ),
        (lambda p: ([line(p, '{"text": "a"}\n')], "bytes", 1.0), "must be at least 0 and below 1, not 1.0"),
        (
            lambda p: ([line(p, '{"text": "a"}\n')], str(p / "t.json"), 0.01),
            "cannot read the tokenizer: No such file",
        ),
        (lambda p: ([line(p, '{"text": "a"}\n')], bad_tokenizer(p, "{}"), 0.01), "is not a tokenizer.json"),
    ],
)
def test_wrong_input_is_named(tmp_path, make, message):
    listed, tokenizer, fraction = make(tmp_path)
    with pytest.raises(UsageError) as raised:
        prepare_folder(listed, tmp_path / "out" / "x", tokenizer=tokenizer, validation_fraction=fraction)
    assert message in raised.value.text()
    assert not list((tmp_path / "out").glob("*")), "nothing is left behind"


def line(folder, content):
    (folder / "l.jsonl").write_text(content)
    return str(folder / "l.jsonl")


def test_a_tokenizer_without_a_separator_is_refused_or_told(tmp_path, jsonl, tokenizer_json):
    document = json.loads(tokenizer_json.read_text())
    document["added_tokens"] = []
    document["model"]["vocab"] = {
        ("<mine>" if token == "<|endoftext|>" else token): index
        for token, index in document["model"]["vocab"].items()
    }
    path = bad_tokenizer(tmp_path, json.dumps(document))
    with pytest.raises(UsageError, match="has no end-of-text token to separate documents"):
        prepare_folder([str(jsonl)], tmp_path / "out", tokenizer=path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<mine>"}}')
    corpus = prepare_folder([str(jsonl)], tmp_path / "out", tokenizer=str(tmp_path))
    assert corpus.manifest.tokenizer.separator == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<other>"}')
    with pytest.raises(UsageError, match="eos_token '<other>' is not in the vocabulary"):
        prepare_folder([str(jsonl)], tmp_path / "more", tokenizer=str(tmp_path))
