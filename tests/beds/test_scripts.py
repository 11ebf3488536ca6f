"""The bed scripts are sound before anything is brought up with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.beds import unavailable

SCRIPTS = sorted(Path(__file__).parent.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_scripts_are_clean() -> None:
    if shutil.which("shellcheck") is None:
        unavailable("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "-x", *SCRIPTS], capture_output=True, text=True, cwd=SCRIPTS[0].parent, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", ["ssh_bed.sh", "slurm_bed.sh", "prom_bed.sh"])
def test_usage(script: str) -> None:
    path = SCRIPTS[0].with_name(script)
    assert subprocess.run([path, "--help"], capture_output=True, check=False).returncode == 0
    wrong = subprocess.run([path, "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage: ")
