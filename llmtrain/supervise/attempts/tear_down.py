"""The end of an attempt: ranks are asked or killed, and nothing is left running that could be ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llmtrain.agent import messages
from llmtrain.backends.base import Node
from llmtrain.supervise.attempts.crew import Crew
from llmtrain.supervise.detection.detect import ended_well
from llmtrain.supervise.nodes.fleet import sweep_nodes
from llmtrain.supervise.session import Session


class TearDown:
    """Ends one attempt. With a limit at each step: ranks that do not leave are killed, agents that do not
    answer are cut off, nodes that were not seen to be clean are swept."""

    def __init__(self, session: Session, crew: Crew) -> None:
        self._session, self._crew, self._limits = session, crew, session.limits
        self.grace: float | None = None
        """Seconds that the ranks were given to save; None: they were not asked."""

    def end(self, *, in_order: bool, note: Callable[[str], None], leaves_for: str = "") -> None:
        """Ask the ranks to leave when the end is `in_order`; end what is left. Adds nodes that are lost to
        the crew's unreachable ones. `leaves_for`: the supervisor's own wish to end the attempt."""
        crew = self._crew
        if in_order and crew.reports.started is not None and not ended_well(crew.reports):
            self._stop_as_asked(self._limits.save if leaves_for else None)
        crew.fleet.send_all(messages.Stop(grace=0.0))
        crew.wait(crew.is_gone, self._limits.tear_down)
        crew.fleet.cut()
        unclean = [
            crew.plan.nodes[index]
            for index, report in crew.reports.nodes.items()
            if (report.gone is None or report.gone.left) and report.name not in crew.unreachable
        ]
        # An agent that nobody saw end, on a node that cannot be reached either: the node is lost.
        vanished = [node for node in unclean if crew.fleet.exit_code(crew.plan.nodes.index(node)) is None]
        unreachable = self._sweep(unclean, note)
        crew.unreachable += [node.name for node in vanished if node.name in unreachable]

    def why_nothing_saved(self) -> str:
        """Why an attempt that was to stop did not end well."""
        reports = self._crew.reports
        if reports.started is None or not reports.pids:
            return "no rank had been started"
        if self.grace == 0.0:
            return "the ranks were killed at once"
        if any(end.exit_code != 0 and not end.killed for end in reports.ends.values()):
            return "ranks ended before they could save"
        if not reports.ends:
            return "agents and ranks were killed by somebody else"
        return f"the ranks did not leave within {self.grace or 0.0:g} s and were killed"

    def _stop_as_asked(self, own_wish: float | None) -> None:
        """Ask the ranks to save and leave, within `own_wish` seconds or as people want it; a stronger wish
        that comes meanwhile hastens them."""
        deadline = 0.0
        while not self._crew.is_gone():
            wish = min(
                (each for each in (self._session.control.wish(), own_wish) if each is not None), default=None
            )
            if wish is not None and (self.grace is None or wish < self.grace):
                self.grace = wish
                self._crew.fleet.send_all(messages.Stop(grace=wish))
                deadline = time.monotonic() + wish + self._limits.tear_down
            if time.monotonic() > deadline:
                return
            self._crew.pump()

    def _sweep(self, nodes: Sequence[Node], note: Callable[[str], None]) -> set[str]:
        """End what is left on nodes; names of those that cannot be reached."""
        session, older_than = self._session, self._crew.plan.number + 1
        swept, failed = sweep_nodes(session.run, session.backend, nodes, older_than=older_than, grace=0.0)
        for name, word in {**swept, **failed}.items():
            note(f"{name}: {word}")
        return set(failed)
