"""How long many nodes take until they are ready: looked at, agents up, the ways between them tried."""

from __future__ import annotations

import os
import time

from llmtrain.agent import messages
from llmtrain.backends.base import Backend
from llmtrain.config.job import JobSpec
from llmtrain.run.layout import RunDir
from llmtrain.supervise.nodes.fleet import Fleet
from tests.support.stand_in_runs import wait_for


def limit_seconds(seconds: float) -> float:
    """A limit for a machine that has its cores for itself; others' work may keep us from them."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)


def bring_up(run: RunDir, backend: Backend, spec: JobSpec, limit: float) -> dict[str, float]:
    """Seconds from the beginning until the nodes were looked at, all agents spoke, and every node had tried
    the rendezvous port of the first one."""
    run.attempt(1).logs.mkdir(parents=True)
    began, took = time.monotonic(), dict[str, float]()
    nodes = backend.nodes(spec, run)
    took["looked at"] = time.monotonic() - began
    fleet = Fleet(run, 1, backend, nodes)
    heard: dict[int, messages.Message] = {}

    def all_said(kind: type[messages.Message], wanted: set[int]) -> bool:
        for node, message in fleet.receive(0.1):
            if isinstance(message, kind):
                heard[node] = message
        return heard.keys() >= wanted

    try:
        assert fleet.open() == {}
        everyone = set(range(len(nodes)))
        wait_for(lambda: all_said(messages.Hello, everyone), limit, "all agents")
        took["agents up"] = time.monotonic() - began
        heard.clear()
        fleet.send(0, messages.PickPort())
        wait_for(lambda: all_said(messages.Port, {0}), limit, "a port")
        port = heard[0].port
        heard.clear()
        for node in everyone - {0}:
            fleet.send(node, messages.Reach(address=nodes[0].address, port=port, timeout=0.3, retries=3))
        wait_for(lambda: all_said(messages.Reached, everyone - {0}), limit, "all ways")
        assert {message.error for message in heard.values()} == {""}
        took["ready"] = time.monotonic() - began
    finally:
        fleet.cut()
    return took
