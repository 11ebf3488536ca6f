"""Preparing: every kind of source and tokenizer, restarts, several processes at once, and clear errors."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.config.recipe import DataConfig
from llmtrain.corpus import sources
from llmtrain.corpus.documents import read_sections
from llmtrain.corpus.prepare import prepare, prepare_folder
from llmtrain.corpus.prepared import open_prepared
from llmtrain.corpus.sources import SourceFile, cut_into_parts, find_files
from llmtrain.errors import CorpusError, UsageError
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


SCRIPT = """
import sys
from llmtrain.corpus import sources
from llmtrain.corpus.prepare import prepare_folder
sources.cut_into_parts.__defaults__ = (20_000,)
if __name__ == "__main__":
    from pathlib import Path
    corpus = prepare_folder([sys.argv[1]], Path(sys.argv[2]), workers=int(sys.argv[3]),
                            progress=lambda step: print(step.phase, step.done, flush=True))
    print("digest", corpus.digest)
"""


def start(tmp_path, source, out, workers=1):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(source), str(out), str(workers)], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def large(tmp_path):
    """About 2 MB of jsonl."""
    path = tmp_path / "large.jsonl"
    path.write_text("".join(json.dumps({"text": paragraph(n)}) + "\n" for n in range(25_000)))
    return path


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_preparation_goes_on(tmp_path, large, seed):
    out = tmp_path / "out"
    first = start(tmp_path, large, out)
    rng = random.Random(seed)
    for _ in range(rng.randint(2, 60)):
        first.stdout.readline()
    first.kill()
    first.wait()
    assert not out.exists()
    kept = len(list((tmp_path / ".out.tmp").glob("part-*.json")))
    second = start(tmp_path, large, out)
    lines = second.stdout.read().split("\n")
    assert second.wait() == 0
    assert int(lines[1].split()[1]) >= (kept - 1) * 20_000, "finished parts are not made again"
    assert open_prepared(out).digest == lines[-2].split()[1]
    reference = prepare_folder([str(large)], tmp_path / "reference")
    assert open_prepared(out).digest == reference.digest
    assert not (tmp_path / ".out.tmp").exists()


def test_several_processes_prepare_the_same_corpus_once(tmp_path, large):
    processes = [start(tmp_path, large, tmp_path / "out") for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({text.split("digest ")[-1] for text in outputs}) == 1
    assert sum("merge" in text for text in outputs) == 1, "one worked, the others waited"


def test_a_killed_parent_takes_its_workers_along(tmp_path, large):
    process = start(tmp_path, large, tmp_path / "out", workers=2)
    while "tokenise" not in process.stdout.readline():
        pass
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    deadline = time.monotonic() + 120
    while len(children) < 2 and process.poll() is None and time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


def bad_tokenizer(tmp_path, content, name="tokenizer.json"):
    (tmp_path / name).write_text(content)
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: ([str(p / "nothing.txt")], "bytes", 0.01), "nothing.txt: no such file or folder"),
        (lambda p: ([str(p)], "bytes", 0.01), "holds no text or jsonl file"),
        (lambda p: ([line(p, "")], "bytes", 0.01), "holds no text"),
        (lambda p: ([line(p, "\n\n")], "bytes", 0.01), "holds no text"),
        (lambda p: ([line(p, '{"text": ""}\n')], "bytes", 0.01), "holds no text"),
        (
            lambda p: ([line(p, '{"text": "a"}\n{"body": "b"}\n')], "bytes", 0.01),
            "l.jsonl:2: line has no field 'text'",
        ),
        (lambda p: ([line(p, '{"text": "a"}\n{"te')], "bytes", 0.01), "l.jsonl:2: line is not a JSON object"),
        (lambda p: ([line(p, "[1]\n")], "bytes", 0.01), "l.jsonl:1: line is not a JSON object"),
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
    assert not (tmp_path / "out" / "x").exists()


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
        "import resource,sys;from pathlib import Path;from llmtrain.corpus.prepare import prepare_folder\n"
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
