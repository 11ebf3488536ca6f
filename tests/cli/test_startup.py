"""The budget of the commands that people wait for: CPU time, and modules that must stay out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_folder import abandon, make_run, write_attempt
from tests.support.sample_events import attempt_files

BUDGET = 0.25
"""CPU seconds, user and system, on a machine that does nothing else."""
REFERENCE = 0.06
"""CPU seconds of `import typer` on such a machine; other work on shared cores makes both cost more."""
MOST_LOAD = 1.5
"""No load excuses more than this factor."""
HEAVY = ("torch", "paramiko", "pynvml", "numpy", "pydantic", "tokenizers", "safetensors")

COMMANDS = [
    ["--help"],
    ["--version"],
    ["recipes"],
    ["profiles", "check", "a100-32x8"],
    ["plan", "tiny"],
    ["plan", "tiny", "--json"],
    ["plan", "gpt-175b", "--cluster", "a100-32x8", "--json"],
    ["launch", "tiny", "--dry-run"],
    ["status", "--json"],
    ["status", "RUN", "--json"],
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a run of 8 ranks called RUN, whose supervisor died."""
    run = make_run(tmp_path / "runs" / "RUN", steps=60)
    write_attempt(run, 1, attempt_files(1, restored=0, steps=28, world_size=8, outcome="failed"))
    abandon(run)
    return tmp_path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Byte code is kept between runs, as it is of an installed program."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("byte-code"))}


def cpu_seconds(arguments: list[str], folder: Path, environment: dict[str, str]) -> float:
    """User and system time of one Python process."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.quiet
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_cpu_budget(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """One of a dozen runs keeps the budget; a run of the reference beside each tells the load."""
    best, load = float("inf"), 1.0
    for _ in range(12):
        load = max(load, cpu_seconds(["-c", "import typer"], folder, environment) / REFERENCE)
        best = min(best, cpu_seconds(["-m", "llmtrain", *arguments], folder, environment))
        if best < BUDGET * min(load, MOST_LOAD):
            return
    pytest.fail(f"llmtrain {' '.join(arguments)} used {best:.3f} s of CPU at load {load:.2f}")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_heavy_modules_stay_out(arguments: list[str], folder: Path) -> None:
    code = (
        "import sys\n"
        "from llmtrain.cli.main import run\n"
        f"status = run({arguments!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=60, check=False
    )
    assert (done.returncode, "loaded" in done.stderr) == (0, False), done.stderr
    assert done.stdout
