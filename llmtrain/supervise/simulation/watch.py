"""What the real detectors make of an incident: reports as agents would send them, looked at tick by tick."""

from __future__ import annotations

import random
import signal
from collections import deque
from dataclasses import dataclass

from llmtrain.agent import messages
from llmtrain.events.records import RankState, RankStatus
from llmtrain.events.state import RunState
from llmtrain.events.words import Phase
from llmtrain.supervise.detection.detect import Finding, detect
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.detection.pace import Pace
from llmtrain.supervise.detection.reports import NodeReport, Reports
from llmtrain.supervise.detection.stragglers import Stragglers, work_of
from llmtrain.supervise.simulation.trace import Incident

WATCHED_RANKS = 64
"""Ranks whose states and compute times are played; the detectors need no more of them."""
STRAGGLER_WINDOWS, WINDOW_STEPS = 20, 5
NOISE = 0.01
"""Standard deviation of a rank's compute time from window to window."""
BEGIN = 1e5
"""The clock when an incident happens: everything before went well."""
REPORTED = 0.3
"""Seconds until an agent has told of a dead process: it looks every tenth of a second."""
SLOW_SAVE_LOOKS = 10
LONGEST_LOOK = 4000.0
"""Seconds after which an incident counts as never found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What was found, and how long after."""

    finding: Finding | None
    seconds: float


class Watch:
    """The supervisor's eyes on one simulated attempt after another."""

    def __init__(self, nodes: int, step_seconds: float, limits: Limits, seed: int) -> None:
        self._limits, self._chance = limits, random.Random(seed)
        self._step_seconds = step_seconds
        self._nodes = nodes

    def look(self, incident: Incident, place: int) -> Sighting:
        """Play an incident on the node at a place of the attempt, until it is found or too late."""
        reports = self._healthy_reports()
        if incident.kind == "slow_save":
            return self._look_at_slow_save(reports)
        state = _state_of("step")
        ticks = messages.TICK_SECONDS
        if incident.kind == "rank":
            ended = messages.RankEnded(rank=place * 8, pid=1, exit_code=-signal.SIGKILL)
            reports.observe(place, ended, BEGIN + REPORTED)
        elif incident.kind == "hang":
            ticks = 1.0
        now = BEGIN + REPORTED
        while now < BEGIN + LONGEST_LOOK:
            for report in reports.nodes.values():
                if not (incident.kind == "node" and report.node == place):
                    report.heard = now
            if incident.kind != "hang":
                reports.last_event = now
            found = detect(state, reports, self._limits, now)
            if found:
                return Sighting(finding=found[0], seconds=now - BEGIN)
            now += ticks if incident.kind != "node" else 1.0
        return Sighting(finding=None, seconds=LONGEST_LOOK)

    def look_at_slow_node(self, place: int, excess: float) -> tuple[bool, int]:
        """Whether a node that computes longer is named, and how many others are, after 100 steps."""
        ranks = min(WATCHED_RANKS, max(8, self._nodes))
        slow = place % ranks
        work = work_of(dict.fromkeys(range(ranks), 0))
        stragglers = Stragglers(lambda first, last: work)
        named = set()
        for window in range(STRAGGLER_WINDOWS):
            for rank in range(ranks):
                seconds = self._step_seconds * (1.0 + (excess if rank == slow else 0.0))
                seconds *= 1.0 + self._chance.gauss(0.0, NOISE)
                found = stragglers.observe(rank, WINDOW_STEPS * (window + 1), seconds)
                named |= {each.rank for each in found}
        return slow in named, len(named - {slow})

    def _look_at_slow_save(self, reports: Reports) -> Sighting:
        """A save of up to ten times the usual length, in which no rank says anything."""
        reports.pace.slowest["checkpoint"] = 30.0
        length, state = 290.0 * self._chance.random(), _state_of("checkpoint")
        for look in range(1, SLOW_SAVE_LOOKS + 1):
            now = BEGIN + length * look / SLOW_SAVE_LOOKS
            for report in reports.nodes.values():
                report.heard = now
            found = detect(state, reports, self._limits, now)
            if found:
                return Sighting(finding=found[0], seconds=now - BEGIN)
        return Sighting(finding=None, seconds=length)

    def _healthy_reports(self) -> Reports:
        reports = Reports(attempt=1, world_size=self._nodes, started=0.0, last_event=BEGIN)
        hello = messages.Hello(host="", pid=1, version="")
        for node in range(self._nodes):
            report = NodeReport(node=node, name=f"n{node}", opened=0.0, heard=BEGIN)
            report.hello = hello
            reports.nodes[node] = report
        steps = (self._step_seconds * (1.0 + abs(self._chance.gauss(0.0, NOISE))) for _ in range(64))
        reports.pace = Pace(steps=deque(steps))
        return reports


def _state_of(phase: Phase) -> RunState:
    ranks = {
        rank: RankState(rank=rank, attempt=1, status=RankStatus.RUNNING, phase=phase, step=100)
        for rank in range(WATCHED_RANKS)
    }
    return RunState(attempt=1, ranks=ranks)
