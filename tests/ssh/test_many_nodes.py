"""32 nodes: looked at, agents up and the ways between them tried, within the time that a person waits."""

from __future__ import annotations

import os
import time

import pytest

from llmtrain.agent import messages
from llmtrain.backends.ssh import SshBackend
from llmtrain.config.job import resolve
from llmtrain.run.layout import RunDir
from llmtrain.supervise.fleet import Fleet
from tests.support import ssh_runs
from tests.support import stand_in_runs as runs

pytestmark = [pytest.mark.e2e, pytest.mark.quiet]

NODES = 32
LIMIT_SECONDS = 15.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)
"""15 s on a machine that has its cores for itself; others' work may keep us from them."""


def test_32_nodes_are_ready_in_time(home, ssh_beds, tmp_path) -> None:
    bed = ssh_beds.nodes(NODES)
    (home / ".ssh" / "config").write_text(bed.ssh_config.read_text())
    profile = ssh_runs.write_profile(tmp_path / "bed.yaml", bed, nodes=NODES)
    spec = resolve("tiny", str(profile), ["parallel.dp=16", "batch.global=64"])
    run = RunDir(tmp_path / "run")
    run.attempt(1).logs.mkdir(parents=True)
    began = time.monotonic()
    backend = SshBackend(spec.cluster)
    fleet = Fleet(run, 1, backend, backend.nodes(spec, run))
    try:
        assert fleet.open() == {}
        heard: dict[int, messages.Message] = {}

        def all_said(kind: type[messages.Message], nodes: set[int]) -> bool:
            for node, message in fleet.receive(0.1):
                if isinstance(message, kind):
                    heard[node] = message
            return heard.keys() >= nodes

        everyone = set(range(NODES))
        runs.wait_for(lambda: all_said(messages.Hello, everyone), LIMIT_SECONDS, "all agents")
        heard.clear()
        fleet.send(0, messages.PickPort())
        runs.wait_for(lambda: all_said(messages.Port, {0}), LIMIT_SECONDS, "a port")
        port = heard[0].port
        heard.clear()
        for node in everyone - {0}:
            fleet.send(node, messages.Reach(address=bed.address("node1"), port=port, timeout=0.3, retries=3))
        runs.wait_for(lambda: all_said(messages.Reached, everyone - {0}), LIMIT_SECONDS, "all ways")
        assert {message.error for message in heard.values()} == {""}
        assert time.monotonic() - began < LIMIT_SECONDS
    finally:
        fleet.cut()
    runs.assert_nothing_left(run)
