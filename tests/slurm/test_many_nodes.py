"""Many nodes of a real SLURM: looked at, agents up and the ways between them tried, over a step for each.

`LLMTRAIN_MANY_NODES=32 pytest tests/slurm/test_many_nodes.py -s` takes so many, and says how long they took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmtrain.backends.slurm.backend import SlurmBackend
from llmtrain.config.job import resolve
from llmtrain.run.layout import RunDir
from tests.support.readiness import bring_up, limit_seconds
from tests.support.slurm_beds import start_slurm_bed

pytestmark = [pytest.mark.e2e, pytest.mark.quiet, pytest.mark.timeout(600)]

NODES = int(os.environ.get("LLMTRAIN_MANY_NODES", "8"))
LIMIT_SECONDS = 15.0


def ready(folder: Path, limit: float) -> dict[str, float]:
    """What `bring_up` says, inside of a job."""
    profile = str(folder / "bed.yaml")
    spec = resolve("tiny", profile, [f"cluster.nodes={NODES}", "parallel.dp=4", "batch.global=64"])
    return bring_up(RunDir(folder / "run"), SlurmBackend(spec.cluster), spec, limit)


def test_many_nodes_are_ready_in_time(shared: Path, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_seconds(LIMIT_SECONDS)
    with ExitStack() as stack:
        bed = start_slurm_bed(stack, NODES)
        monkeypatch.setenv("SLURM_CONF", str(bed.conf))
        job = ["salloc", "--quiet", f"--nodes={NODES}", "--ntasks-per-node=1", "--partition=gpu"]
        inside = [sys.executable, "-m", "tests.slurm.test_many_nodes", str(shared), str(limit)]
        done = subprocess.run([*job, *inside], capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        took = json.loads(done.stdout)
        print(f"seconds until {took}, limit {limit:.0f}")
        assert took["ready"] < limit, took
        assert not [line for name in bed.names[::8] for line in bed.processes(name, str(shared))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ready(Path(sys.argv[1]), float(sys.argv[2]))))
