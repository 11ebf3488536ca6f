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
        (["show", "nothing"], 1, "this is not a prepared corpus\n  hint: run `llmtrain data prepare`"),
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
    ],
)
def test_wrong_calls(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    assert run(["data", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


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
