"""Wrong recipes, profiles and flags.

Each with its exact message and exit code 2, through the real command line.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.cli.main import run
from tests.support.documents import PROFILE, RECIPE
from tests.support.transcripts import Case, read_cases

CASES = [case for path in sorted(Path(__file__).parent.glob("bad_input/*.txt")) for case in read_cases(path)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return work


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_wrong_input_is_explained(case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.write(folder)
    status = run(case.arguments)
    captured = capsys.readouterr()
    assert captured.err.rstrip("\n") == case.says
    assert captured.out == ""
    assert status == 2
    assert not (folder.parent / "state").exists(), "a crash report was written"


def test_the_table_is_large_and_its_names_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 100


def test_the_valid_documents_are_valid(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table breaks these; unbroken they pass, so that each row fails for its own reason."""
    (folder / "r.yaml").write_text(RECIPE)
    (folder / "c.yaml").write_text(PROFILE)
    assert run(["recipes", "check", "r.yaml", "--cluster", "c.yaml"]) == 0
    assert run(["profiles", "check", "c.yaml"]) == 0
    assert capsys.readouterr().err == ""


FEW = ["unknown key", "everything at once", "unknown command", "unknown option", "binary", "missing file"]


@pytest.mark.parametrize("name", FEW)
def test_the_same_in_a_process_of_its_own(name: str, folder: Path) -> None:
    case = next(entry for entry in CASES if entry.name == name)
    case.write(folder)
    command = [sys.executable, "-m", "llmtrain", *case.arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.rstrip("\n")) == (2, "", case.says)
