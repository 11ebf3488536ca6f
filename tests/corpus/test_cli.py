"""`llmtrain data`, as a person and as a program see it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llmtrain.cli.main import run


def test_prepare_and_show(tmp_path, jsonl, capsys):
    out = str(tmp_path / "out")
    assert (
        run(["data", "prepare", str(jsonl), "--out", out, "--validation-fraction", "0.1", "--workers", "1"])
        == 0
    )
    seen = capsys.readouterr()
    assert "train " in seen.out
    assert seen.err.endswith(" s\n")
    assert run(["data", "show", out, "--json", "--verify"]) == 0
    seen = capsys.readouterr()
    shown = json.loads(seen.out)
    corpus = shown["corpus"]
    assert shown["schema"] == 1
    assert corpus["train"]["documents"] + corpus["validation"]["documents"] == 300
    assert corpus["sources"][0]["source"] == str(jsonl)
    assert corpus["tokenizer"]["vocab"] == 256
    assert seen.err == "all checksums match\n"
    assert run(["data", "prepare", str(jsonl), "--out", out, "--validation-fraction", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**shown, "problems": []}, "a second time: nothing to do"


def test_an_empty_split_is_told(tmp_path, capsys):
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"text {index}\n")
    arguments = ["data", "prepare", *(str(tmp_path / f"{index}.txt") for index in range(8))]
    arguments += ["--workers", "1", "--out"]
    assert run([*arguments, str(tmp_path / "few")]) == 0
    told = "warning: validation: the split is empty: 0.01 of 8 documents held out none\n  hint: give a larger"
    assert told in capsys.readouterr().err
    assert run([*arguments, str(tmp_path / "few"), "--json"]) == 0
    assert [entry["where"] for entry in json.loads(capsys.readouterr().out)["problems"]] == ["validation"]
    assert run([*arguments, str(tmp_path / "none"), "--validation-fraction", "0", "--json"]) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out)["problems"] == [] and "empty" not in seen.err, "0 asks for none"


def test_damage_is_found(tmp_path, jsonl, capsys):
    out = tmp_path / "out"
    assert run(["data", "prepare", str(jsonl), "--out", str(out)]) == 0
    content = bytearray((out / "train.bin").read_bytes())
    content[7] ^= 1
    (out / "train.bin").write_bytes(content)
    assert run(["data", "show", str(out)]) == 0
    assert run(["data", "show", str(out), "--verify"]) == 1
    assert "train.bin: is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "nothing"], 2, "this is not a prepared corpus\n  hint: run `llmtrain data prepare`"),
        (["prepare", "nothing", "--out", "x"], 2, "nothing: no such file or folder"),
        (["prepare", "--out", "x"], 2, "missing argument 'SOURCE...'"),
        (["prepare", "python-stdlib"], 2, "missing option '--out'"),
        (["prepare", "python-stdlib", "--out", "x", "--tokenizer", "byte"], 2, "cannot read the tokenizer"),
        (["prepare", "python-stdlib", "--out", "x", "--workers", "0"], 2, "0 is not >= 1"),
        (
            ["prepare", "python-stdlib", "--out", "x", "--validation-fraction", "2"],
            2,
            "at least 0 and below 1",
        ),
        (["prepare", "torn.parquet", "--out", "x"], 2, "torn.parquet: is not a whole parquet file"),
        (["prepare", "torn.jsonl.gz", "--out", "x"], 2, "torn.jsonl.gz: is not a whole gzip file"),
        (["prepare", "bad.jsonl", "--out", "x"], 2, 'each line of a jsonl file is an object like {"text": '),
        (["prepare", "torn.idx", "--out", "x"], 2, "torn.idx: is not an index of a token file"),
        (["prepare", "ready", "--out", "x"], 2, "holds tokens and no text\n  hint: it needs no preparation"),
        (["prepare", "a.txt", "--out", "."], 2, ".: exists and is not a prepared corpus"),
        (["prepare", "a.txt", "--out", "/"], 2, "/: exists and is not a prepared corpus"),
        (["prepare", "a.txt", "--out", "a.txt/y/x"], 2, "cannot prepare: Not a directory"),
    ],
)
def test_wrong_calls(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    for name in ("torn.parquet", "torn.jsonl.gz", "bad.jsonl", "torn.idx", "torn.bin", "a.txt"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "corpus.json").write_text("{}")
    assert run(["data", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("x*")) and not list(tmp_path.glob(".*")), "nothing is left behind"


def test_files_that_are_read_as_text_for_want_of_better_are_told(tmp_path, capsys):
    for name in ("a.csv", "b.txt", "plain"):
        (tmp_path / name).write_text("one,two\n" * 500)
    files = [str(tmp_path / name) for name in ("a.csv", "b.txt", "plain")]
    assert run(["data", "prepare", *files, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert told.count("read as plain text") == 1 and "a.csv: read as plain text, for `.csv`" in told


@pytest.mark.parametrize(
    "arguments", [["data", "--help"], ["checkpoint", "--help"], ["data", "show", "nothing"]]
)
def test_light_commands_load_nothing_heavy(arguments):
    code = (
        "import sys; from llmtrain.cli.main import run; run(sys.argv[1:]);"
        "print([name for name in ('torch', 'tokenizers', 'paramiko', 'pynvml') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
