"""The places that the launch contract is tried in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import PROFILE as SLURM_PROFILE
from tests.support import ssh_runs
from tests.support.beds import ssh_bed, ssh_beds
from tests.support.contract import Place, undisturbed
from tests.support.slurm_beds import _slurm_bed, slurm_bed
from tests.support.stand_in_runs import prepared_corpus

__all__ = ["_slurm_bed", "slurm_bed", "ssh_bed", "ssh_beds", "undisturbed"]


@pytest.fixture(scope="session")
def corpus() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="llmtrain-contract-") as folder:
        yield prepared_corpus(Path(folder))


@pytest.fixture(params=["local", "ssh", "slurm"])
def place(
    request: pytest.FixtureRequest, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """One backend; nothing of its runs is left afterwards."""
    (tmp_path / "runs").mkdir()
    profile, bed = tmp_path / "bed.yaml", None
    if request.param == "ssh":
        bed = request.getfixturevalue("ssh_bed")
        (tmp_path / ".ssh").mkdir(mode=0o700)
        (tmp_path / ".ssh" / "config").write_text(bed.ssh_config.read_text())
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        ssh_runs.write_profile(profile, bed)
    elif request.param == "slurm":
        bed = request.getfixturevalue("slurm_bed")
        profile.write_text(SLURM_PROFILE.format(storage=tmp_path / "runs"))
    named = "local" if request.param == "local" else str(profile)
    made = Place(kind=request.param, folder=tmp_path, profile=named, corpus=corpus, bed=bed)
    yield made
    made.clean_up()
