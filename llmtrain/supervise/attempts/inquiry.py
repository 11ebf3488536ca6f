"""What the agents see of their ranks when something is wrong: asked for, waited for briefly, and judged."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmtrain.agent import messages
from llmtrain.supervise.attempts.crew import Crew
from llmtrain.supervise.detection.detect import Finding
from llmtrain.supervise.detection.evidence import RankEvidence, blame
from llmtrain.supervise.detection.limits import Limits

AGAIN_SECONDS = 1.0
"""Between two questions to the agents about the same suspicion."""
BUSY_FACTOR = 4.0
"""Ranks that may only be slow are given so many times the limit."""


class Inquiry:
    """Asks the agents of one attempt."""

    def __init__(self, crew: Crew, limits: Limits) -> None:
        self._crew, self._limits = crew, limits
        self._asked = float("-inf")

    def ask(self, seconds: float) -> None:
        """Have all agents that live say what they see; waits at most so long."""
        asked = self._asked = time.monotonic()
        reports = self._crew.reports.nodes
        for node, report in reports.items():
            if not (report.gone or report.closed):
                self._crew.fleet.send(node, messages.Look())
        self._crew.wait(
            lambda: all(each.gone or each.closed or each.looked >= asked for each in reports.values()),
            seconds,
        )

    def confirm(self, hang: Finding) -> Finding | None:
        """The hang with the ranks named that the others wait for; None while it is too early to tell."""
        if time.monotonic() - self._asked < AGAIN_SECONDS:
            return None
        before = self._crew.reports.last_sign
        self.ask(self._limits.stacks)
        if self._crew.reports.last_sign != before:
            return None
        evidence = self._crew.reports.evidence
        return judge(hang, [evidence[rank] for rank in sorted(evidence)], self._crew.reports.node_of)


def judge(hang: Finding, seen: Sequence[RankEvidence], node_of: Mapping[int, int]) -> Finding | None:
    """The hang with the ranks named that the others wait for; None while they may only be slow. Pure."""
    found = blame(seen)
    # When nobody waits for anybody, all are at some long work of their own.
    may_be_slow = found.is_busy if found is not None else any(each.flight for each in seen)
    if may_be_slow and hang.silent < BUSY_FACTOR * hang.limit:
        return None
    if found is None:
        return hang
    first = found.ranks[0]
    head, _, _ = hang.message.partition("; furthest behind")
    return replace(hang, message=f"{head}; {found.reason}", rank=first, node=node_of.get(first))
