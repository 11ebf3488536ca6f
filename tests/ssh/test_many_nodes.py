"""32 nodes: looked at, agents up and the ways between them tried, within the time that a person waits."""

from __future__ import annotations

import pytest

from llmtrain.backends.ssh import SshBackend
from llmtrain.config.job import resolve
from llmtrain.run.layout import RunDir
from tests.support import ssh_runs
from tests.support import stand_in_runs as runs
from tests.support.readiness import bring_up, limit_seconds

pytestmark = [pytest.mark.e2e, pytest.mark.quiet]

NODES = 32


def test_32_nodes_are_ready_in_time(home, ssh_beds, tmp_path) -> None:
    bed = ssh_beds.nodes(NODES)
    (home / ".ssh" / "config").write_text(bed.ssh_config.read_text())
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", bed, nodes=NODES)
    spec = resolve("tiny", str(profile), ["parallel.dp=16", "batch.global=64"])
    run, limit = RunDir(tmp_path / "run"), limit_seconds(15.0)
    took = bring_up(run, SshBackend(spec.cluster), spec, limit)
    assert took["ready"] < limit, took
    runs.assert_nothing_left(run)
