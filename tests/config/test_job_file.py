"""`job.json` and `attempt.json`: there and back, and what is said about torn or foreign ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.config.codec import digest
from llmtrain.config.job import resolve
from llmtrain.config.layout import Layout
from llmtrain.errors import RunError
from llmtrain.run.job_file import (
    AttemptFile,
    JobFile,
    read_attempt_file,
    read_job_file,
    write_attempt_file,
)
from tests.support.run_folder import write_job_file

JOB = JobFile(
    run_id="tiny-1", version="0.1.0", spec=resolve("tiny", "local"), layout=Layout(dp=2, tp=2, pp=2)
)
ATTEMPT = AttemptFile(number=3, layout=Layout(dp=2), nodes=("a", "b"), restore="newest")


def test_there_and_back(tmp_path: Path) -> None:
    write_job_file(tmp_path / "job.json", JOB)
    write_attempt_file(tmp_path / "attempt.json", ATTEMPT)
    assert read_job_file(tmp_path / "job.json") == JOB
    assert read_attempt_file(tmp_path / "attempt.json") == ATTEMPT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt.json", "job.json"]


def test_people_can_read_it(tmp_path: Path) -> None:
    write_job_file(tmp_path / "job.json", JOB)
    document = json.loads((tmp_path / "job.json").read_text())
    assert document["schema"] == 1
    assert document["spec"]["recipe"]["batch"]["global"] == 16
    assert document["layout"]["pp"] == 2


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_torn(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "job.json"
    write_job_file(path, JOB)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(RunError) as error:
        read_job_file(path)
    assert error.value.text() == (
        f"{path}: is not JSON; it was torn or edited\n"
        "  hint: restore the file as it was, or launch a new run with `llmtrain launch`"
    )


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "hidden", 4096),
        ("train", "steps", 7),
        ("train", "learning_rate", float("nan")),
        (None, "nodes", 9),
    ],
)
def test_edited_after_the_launch(tmp_path: Path, section: str | None, field: str, value: float) -> None:
    path = tmp_path / "job.json"
    write_job_file(path, JOB)
    document = json.loads(path.read_text())
    part = document["spec"]["recipe"][section] if section else document["spec"]["cluster"]
    part[field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(RunError) as error:
        read_job_file(path)
    if value == value:
        assert f"{path}: spec.recipe or spec.cluster was edited after the launch" in error.value.text()
        assert f"spec.digest says {JOB.spec.digest}" in error.value.text()
        assert "hint: restore the file as it was, or launch a new run" in error.value.text()
        assert read_job_file(path, edited_too=True).run_id == JOB.run_id


def test_another_form_of_the_same_values_is_no_edit(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    write_job_file(path, JOB)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert read_job_file(path) == JOB


def test_a_file_without_fields_that_came_later_is_read(tmp_path: Path) -> None:
    """An earlier version wrote it, with the digest of the fields that it knew."""
    path = tmp_path / "job.json"
    write_job_file(path, JOB)
    document = json.loads(path.read_text())
    del document["spec"]["recipe"]["checkpoint"]
    spec = document["spec"]
    spec["digest"] = digest({"recipe": spec["recipe"], "cluster": spec["cluster"]})
    path.write_text(json.dumps(document))
    assert read_job_file(path).spec.recipe.checkpoint == CheckpointConfig()


def test_missing_and_foreign(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with pytest.raises(RunError, match="no such file"):
        read_job_file(path)
    with pytest.raises(RunError, match="cannot be read: is a directory"):
        read_job_file(tmp_path)
    path.write_text("[]")
    with pytest.raises(RunError, match="holds no JSON object"):
        read_job_file(path)
    path.write_text('{"schema": 2}')
    with pytest.raises(RunError, match="has schema 2; this llmtrain reads schema 1"):
        read_job_file(path)


def test_every_wrong_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "attempt.json"
    path.write_text('{"schema": 1, "number": "x", "layout": {"dq": 1}, "nodes": [1], "restore": "newst"}')
    with pytest.raises(RunError) as error:
        read_attempt_file(path)
    assert [problem.message for problem in error.value.problems] == [
        "number must be a whole number, not `x`",
        "unknown key `dq` in layout",
        "nodes.0 must be text, not `1`",
        "restore must be one of fresh, newest, not `newst`",
    ]
    assert {problem.where for problem in error.value.problems} == {str(path)}
