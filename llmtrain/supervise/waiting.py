"""Waiting for nodes to come back when nothing fits on those that are left."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmtrain.errors import InfeasibleError
from llmtrain.run.record import RunRecord
from llmtrain.supervise.corpus import StopWantedError
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.nodes.members import Members
from llmtrain.supervise.session import Session
from llmtrain.units import format_duration


def plan_or_wait(
    session: Session,
    members: Members,
    record: RunRecord,
    number: int,
    *,
    save: Callable[[RunRecord], None],
    note: Callable[[str], None],
) -> AttemptPlan:
    """The next attempt; where nothing fits, nodes in quarantine are waited for, as long as the profile says,
    and looked at now and then. Every newer record goes to `save`.

    Raises InfeasibleError when the time is over, StopWantedError, and what `Members` raises.
    """
    patience = session.job.spec.cluster.failures.wait_for_node
    deadline = time.monotonic() + patience
    is_told = False
    while True:
        try:
            return members.plan(record, number)
        except InfeasibleError as error:
            if time.monotonic() >= deadline or not record.away:
                raise
            if not is_told:
                note(f"{error}; waiting for nodes to come back, for at most {format_duration(patience)}")
                is_told = True
        session.control.sleep(session.limits.look_again)
        if session.control.wish() is not None:
            raise StopWantedError
        record = members.look_again(record)
        save(record)
