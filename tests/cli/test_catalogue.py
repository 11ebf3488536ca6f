"""`llmtrain recipes` and `llmtrain profiles`: list, show, check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain import resources
from llmtrain.cli.main import run
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.codec import from_json
from llmtrain.config.load import load_profile, load_recipe
from llmtrain.config.recipe import Recipe
from tests.support.documents import PROFILE, RECIPE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "c.yaml").write_text(PROFILE)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("command", ["recipes", "profiles"])
def test_list(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = "recipes" if command == "recipes" else "cluster_profiles"
    names = [path.stem for path in resources.shipped(kind)]
    text = said(capsys, command)
    assert text == said(capsys, command, "list")
    assert [line.split()[0] for line in text.splitlines()] == ["NAME", *names]
    document = json.loads(said(capsys, command, "--json"))
    assert document == json.loads(said(capsys, command, "list", "--json"))
    assert document["schema"] == 1
    assert [entry["name"] for entry in document[command]] == names
    for entry in document[command]:
        assert entry["description"]
        assert Path(entry["path"]).is_file()


def test_show_is_the_file_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "recipes", "show", "tiny") == resources.find("recipes", "tiny").read_text()
    assert said(capsys, "recipes", "show", "r.yaml") == RECIPE
    assert said(capsys, "profiles", "show", "c.yaml") == PROFILE


def test_show_as_json_is_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = json.loads(said(capsys, "recipes", "show", "r.yaml", "--json"))
    assert from_json(Recipe, recipe["recipe"]) == load_recipe("r.yaml")
    profile = json.loads(said(capsys, "profiles", "show", "local", "--json"))
    assert from_json(ClusterProfile, profile["profile"]) == load_profile("local")
    assert recipe["schema"] == profile["schema"] == 1


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "recipes", "check", "r.yaml") == "r.yaml: no problems\n"
    assert said(capsys, "recipes", "check", "r.yaml", "--cluster", "c.yaml", "--set", "train.seed=3")
    assert said(capsys, "profiles", "check", "local", "--set", "nodes=1", "--set", "cluster.spares=0")
    assert json.loads(said(capsys, "profiles", "check", "c.yaml", "--json")) == {
        "schema": 1,
        "profile": "c.yaml",
        "problems": [],
    }


def test_check_with_a_cluster_finds_what_the_recipe_alone_does_not_show(capsys) -> None:
    assert run(["recipes", "check", "r.yaml", "--set", "parallel.dp=4"]) == 0
    capsys.readouterr()
    assert run(["recipes", "check", "r.yaml", "--cluster", "c.yaml", "--set", "parallel.dp=4", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [problem["where"] for problem in document["problems"]] == ["--set parallel.dp=4"]


def test_files_that_a_recipe_names_must_be_there(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["recipes", "show", "tiny"]) == 0
    text = capsys.readouterr().out
    assert "\ndata:\n" in text
    head, tail = (part for part in text.split("\ndata:\n"))
    tail = "".join(
        line for line in tail.splitlines(True) if "corpus:" not in line and "tokenizer:" not in line
    )
    (tmp_path / "mine.yaml").write_text(f"{head}\ndata:\n  corpus: texts\n  tokenizer: words\n{tail}")
    line = head.count("\n") + 3
    told = f"mine.yaml:{line}: no such file or folder: {tmp_path}/texts\n  hint: a corpus is"
    for arguments in (
        ["recipes", "check", "mine.yaml"],
        ["recipes", "check", "mine.yaml", "--cluster", "local"],
    ):
        assert run(arguments) == 2
        error = capsys.readouterr().err
        assert told in error and f"mine.yaml:{line + 1}: no such file or folder: {tmp_path}/words" in error
    assert run(["launch", "mine.yaml", "--run-dir", "run", "--detach"]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "run").exists()
    override = ["--set", "data.tokenizer=bytes"]
    assert run(["launch", "mine.yaml", "--run-dir", "run", "--detach", *override]) == 2
    assert "words" not in capsys.readouterr().err and not (tmp_path / "run").exists()
    remote = ["--cluster", "a100-32x8", "--set", "cluster.backend.kind=slurm"]
    run(["recipes", "check", "mine.yaml", *remote])
    assert "no such file" not in capsys.readouterr().err, "on a cluster, the path is the cluster's"
    (tmp_path / "texts").mkdir()
    (tmp_path / "words").write_text("{}")
    assert run(["recipes", "check", "mine.yaml", "--cluster", "local"]) == 0


def test_a_launch_looks_into_prepared_corpora_first(capsys, tmp_path) -> None:
    """Nothing was held out of one of two parts, which a rank would find only after the run's start."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 2000)
    for name, fraction in (("whole", "0"), ("split", "0.2")):
        arguments = ["text.txt", "--out", name, "--validation-fraction", fraction, "--workers", "1"]
        assert run(["data", "prepare", *arguments]) == 0
    blend = "data.blend=[{corpus: split, weight: 1}, {corpus: whole, weight: 1}]"
    launch = ["launch", "tiny", "--run-dir", "run", "--detach", "--set"]
    for override, place in (("data.corpus=whole", "data.corpus=whole"), (blend, blend)):
        assert run([*launch, override]) == 2
        error = capsys.readouterr().err
        assert f"--set {place}: {tmp_path}/whole: has 0 validation tokens, too few for one window" in error
        assert "data.validation_every=0" in error and not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_made_is_a_wrong_word(capsys) -> None:
    assert run(["launch", "tiny", "--run-dir", "/proc/foo", "--detach"]) == 2
    assert "/proc/foo: cannot be written" in capsys.readouterr().err


def test_the_prefix_of_an_indexed_corpus_is_there(capsys, tmp_path) -> None:
    arguments = ["recipes", "check", "tiny", "--set", f"data.corpus={tmp_path}/my"]
    (tmp_path / "my.bin").touch()
    assert run(arguments) == 2
    (tmp_path / "my.idx").touch()
    assert run(arguments) == 0
