"""The agents of one attempt in conversation: what they say is taken in, and they are pinged."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmtrain.agent import messages
from llmtrain.backends.base import Backend
from llmtrain.events.event import Event
from llmtrain.events.state import RunState, apply
from llmtrain.run.layout import RunDir
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.detection.reports import NodeReport, Reports
from llmtrain.supervise.nodes.fleet import Fleet, wait_until

PAUSE_SECONDS = 5.0
"""A gap in the supervisor's own loop that means it was suspended, and not that everybody fell silent."""


class Crew:
    """Channels to the agents of one attempt, and all that they have said; one thread at a time uses it."""

    def __init__(self, run: RunDir, plan: AttemptPlan, backend: Backend, *, standby: bool = False) -> None:
        self.plan = plan
        self.fleet = Fleet(run, plan.number, backend, plan.nodes, standby=standby)
        self.reports = Reports(attempt=plan.number, world_size=plan.layout.world_size)
        self.state = RunState()
        self.unreachable: list[str] = []
        """Names of nodes that could not be reached."""
        self.note: Callable[[str], None] = lambda text: None
        """Told what agents want a person to know."""
        self.on_event: Callable[[Event], None] = lambda event: None
        """Told every event of a rank or an agent."""
        self.renew: Callable[[], None] = lambda: None
        """Called every second; raises when the supervisor may not go on."""
        self._may_go_on = True
        self._pinged = self._looked = time.monotonic()

    def open(self) -> dict[int, str]:
        """Start all agents; node rank -> error for those that could not be reached."""
        now = time.monotonic()
        for index, node in enumerate(self.plan.nodes):
            self.reports.nodes[index] = NodeReport(node=index, name=node.name, opened=now, heard=now)
        return self.fleet.open()

    def pump(self, timeout: float = messages.TICK_SECONDS) -> None:
        """Take in what the agents say, for at most so long; ping them and renew, when it is due."""
        arrived = list(self.fleet.receive(timeout))
        self._forgive_own_pause()
        for node, message in arrived:
            event = self.reports.observe(node, message, time.monotonic())
            if event is not None:
                self.state = apply(self.state, event)
                self.on_event(event)
        while self.reports.notes:
            self.note(self.reports.notes.pop(0))
        self._looked = now = time.monotonic()
        if now - self._pinged >= messages.HEARTBEAT_SECONDS:
            self._pinged = now
            self.fleet.send_all(messages.Ping())
            self._renew()

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Pump until something is done or the time is over; whether it was done."""
        return wait_until(done, seconds, self.pump)

    def is_gone(self) -> bool:
        """Whether every agent has left, or its channel has ended."""
        return all(report.gone or report.closed for report in self.reports.nodes.values())

    def name(self, node: int) -> str:
        """Name of a node of the attempt."""
        return self.plan.nodes[node].name

    def _renew(self) -> None:
        """Once it has failed, only the tear-down goes on."""
        if self._may_go_on:
            self._may_go_on = False
            self.renew()
            self._may_go_on = True

    def _forgive_own_pause(self) -> None:
        gap = time.monotonic() - self._looked
        if gap > PAUSE_SECONDS:
            self.reports.forgive(gap)
