"""Finding a run by what a person types."""

from __future__ import annotations

import os

import pytest

from llmtrain.cli.main import run
from llmtrain.errors import UsageError
from llmtrain.run.find import find_run, list_runs
from llmtrain.run.layout import RunDir


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """`runs/` with four runs, made in this order, and things that are no runs."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["tiny-0101-aaaa", "tiny-0102-bbbb", "llama-0101-cccc", "tiny-0102-bbcc"]):
        (tmp_path / "runs" / name).mkdir(parents=True)
        job = tmp_path / "runs" / name / "job.json"
        job.write_text("{}")
        os.utime(job, (1000 + age, 1000 + age))
    (tmp_path / "runs" / ".corpora").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "job.json").write_text("{}")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "record.json").write_text("{}")
    return tmp_path / "runs"


def test_newest_first_and_only_runs(storage):
    names = ["tiny-0102-bbcc", "llama-0101-cccc", "tiny-0102-bbbb", "tiny-0101-aaaa"]
    assert [found.run_id for found in list_runs(storage)] == names
    assert list_runs("nowhere") == []


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("tiny-0101-aaaa", "runs/tiny-0101-aaaa"),
        ("llama", "runs/llama-0101-cccc"),
        ("tiny-0102-bbb", "runs/tiny-0102-bbbb"),
        ("runs/tiny-0101-aaaa", "runs/tiny-0101-aaaa"),
        ("runs/tiny-0101-aaaa/", "runs/tiny-0101-aaaa"),
        ("elsewhere", "elsewhere"),
        ("./elsewhere", "elsewhere"),
    ],
)
def test_by_id_beginning_or_path(storage, reference, path):
    assert str(find_run(reference).path) == path


def test_the_working_directory_has_a_name(storage, monkeypatch):
    monkeypatch.chdir(storage / "llama-0101-cccc")
    assert find_run(".").run_id == "llama-0101-cccc"


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        (
            "tiny",
            "'tiny' is the beginning of 3 runs",
            "one of: tiny-0102-bbcc, tiny-0102-bbbb, tiny-0101-aaaa",
        ),
        ("tiny-0103-bbbb", "no run named 'tiny-0103-bbbb' below runs/", "did you mean tiny-0102-bbbb, "),
        ("xyz", "no run named 'xyz' below runs/", "newest runs: tiny-0102-bbcc, llama-0101-cccc, "),
        ("", "no run named '' below runs/", "newest runs: "),
        ("./llama", "no such folder: llama", "give a run id or the path of a run folder"),
        ("runs", "runs is not a run folder: it has no job.json", ""),
        (".corpora", "runs/.corpora is not a run folder: it has no job.json", ""),
        ("lost", "lost has lost its job.json", "put lost/job.json back, or start a new run"),
        ("./lost", "lost has lost its job.json", "put lost/job.json back, or start a new run"),
        ("./runs", "runs is not a run folder: it has no job.json", ""),
    ],
)
def test_unknown_runs(storage, reference, message, hint):
    with pytest.raises(UsageError) as raised:
        find_run(reference)
    problem = raised.value.problems[0]
    assert (problem.where, problem.message) == ("RUN", message)
    assert problem.hint.startswith(hint)


def test_half_of_the_letters_in_common_is_no_likeness(tmp_path):
    job = RunDir(tmp_path / "cos").job_json
    job.parent.mkdir()
    job.write_text("{}")
    with pytest.raises(UsageError) as raised:
        find_run("ghost", tmp_path)
    assert raised.value.problems[0].hint == "newest runs: cos"


def test_without_any_run(tmp_path):
    with pytest.raises(UsageError) as raised:
        find_run("tiny", tmp_path / "none")
    assert "there is no run below" in raised.value.text()
    assert "llmtrain launch tiny" in raised.value.text()


@pytest.mark.parametrize("command", ["stop", "resume"])
def test_commands_that_act_look_where_they_are_told(tmp_path, capsys, command):
    assert run([command, "ghost", "--runs", str(tmp_path / "elsewhere")]) == 2
    assert f"there is no run below {tmp_path / 'elsewhere'}/" in capsys.readouterr().err
