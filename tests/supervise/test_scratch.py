"""The folder of torchrun's notes: one an agent, gone with it, and with the agents after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from llmtrain.agent.scratch import SCRATCH, Scratch


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folder(scratch: Scratch) -> Path:
    path = Path(scratch.variables()[SCRATCH])
    (path / "run.1_x" / "attempt_0").mkdir(parents=True)
    return path


def test_what_killed_agents_left_goes_with_the_next_attempt(temporary: Path) -> None:
    run = Path("/shared/run")
    killed, other_run = folder(Scratch(run, 9)), folder(Scratch(Path("/shared/run2"), 1))
    scratch, other_node = Scratch(run, 10), Scratch(run, 10)
    mine, others = folder(scratch), folder(other_node)
    scratch.sweep()
    assert not killed.exists() and mine.is_dir() and others.is_dir() and other_run.is_dir()
    scratch.remove()
    assert sorted(temporary.iterdir()) == sorted((others, other_run))


def test_without_a_place_torchrun_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    scratch = Scratch(Path("/shared/run"), 1)
    assert scratch.variables() == {}
    scratch.sweep()
    scratch.remove()
