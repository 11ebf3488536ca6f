"""`decide` as a table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmtrain.errors import ExitStatus
from llmtrain.run.record import AttemptRecord
from llmtrain.supervise.decision.policy import (
    AttemptEnd,
    Budget,
    Decision,
    History,
    decide,
    past_budget,
    restarts_without_progress,
)

BUDGET = Budget(nodes=32, node_loss=0.2, restarts_without_progress=3)


def attempts(*reached: int | tuple[int, int], errors: Sequence[str] = ()) -> tuple[AttemptRecord, ...]:
    """Attempts 1.. that reached so many steps (or (step, checkpoint))."""
    made = []
    for index, value in enumerate(reached):
        step, committed = value if isinstance(value, tuple) else (value, 0)
        error = errors[index] if index < len(errors) else ""
        made.append(
            AttemptRecord(
                number=index + 1,
                started=0.0,
                outcome="failed",
                reached_step=step,
                committed_step=committed,
                error=error,
            )
        )
    return tuple(made)


def dead(message: str = "rank 1 died", **fields: object) -> AttemptEnd:
    return AttemptEnd(outcome="failed", cause="rank_dead", message=message, **fields)  # type: ignore[arg-type]


def history(*reached: int | tuple[int, int], first: int = 1, lost: Sequence[str] = ()) -> History:
    return History(attempts=attempts(*reached), first_of_session=first, lost_nodes=lost)


COMPLETED = AttemptEnd(outcome="completed")
STOPPED = AttemptEnd(outcome="stopped", stop_wanted=True)


@pytest.mark.parametrize(
    ("end", "past", "action", "status"),
    [
        (COMPLETED, history(10), "finish", 0),
        # A run that completes while a stop is on its way is done.
        (AttemptEnd(outcome="completed", stop_wanted=True), history(10), "finish", 0),
        (STOPPED, history(5), "stop", 75),
        # Ranks that were told to leave by somebody else (preempted) are resumable as well.
        (AttemptEnd(outcome="stopped"), history(5), "stop", 75),
        # Nodes are back: it left for a better attempt, unless somebody wants a stop.
        (AttemptEnd(outcome="stopped", gain="n2 is back"), history(5), "restart", 0),
        (AttemptEnd(outcome="stopped", gain="n2 is back", stop_wanted=True), history(5), "stop", 75),
        (dead(gain="n2 is back"), history(5), "restart", 0),
        (dead(stop_wanted=True), history(5), "stop", 75),
        (dead(), history(5), "restart", 0),
        (dead(), history(0), "restart", 0),
        # The first attempt is no restart: three restarts without progress are attempts 2, 3 and 4.
        (dead(), history(0, 0, 0), "restart", 0),
        (dead(), history(0, 0, 0, 0), "give_up", 93),
        (dead(), history(7, 7, 7), "restart", 0),
        (dead(), history(7, 7, 7, 7), "give_up", 93),
        # A higher step counts as progress, and so does a newer checkpoint.
        (dead(), history(7, 7, 7, 8), "restart", 0),
        (dead(), history((7, 0), (7, 0), (7, 0), (7, 6)), "restart", 0),
        # Going back and forth below the best is no progress.
        (dead(), history(7, 1, 2, 3), "give_up", 93),
        (dead(), history(7, 9, 1, 2), "restart", 0),
        # A person who resumes gives new chances.
        (dead(), history(7, 7, 7, 7, 7, first=5), "restart", 0),
        (dead(), history(7, 7, 7, 7, 7, 7, 7, 7, first=5), "give_up", 93),
        (dead(error_class="config"), history(0), "give_up", 1),
        (dead(error_class="numeric"), history(50), "give_up", 93),
        (dead(error_class="checkpoint"), history(0), "give_up", 93),
        (dead(error_class="checkpoint"), history(50), "give_up", 93),
        (dead(error_class="checkpoint", stop_wanted=True), history(0), "stop", 75),
        (dead(error_class="storage"), history(50), "restart", 0),
        (dead(error_class="communication"), history(50), "restart", 0),
        (dead(error_class="config", stop_wanted=True), history(0), "stop", 75),
        (dead(), history(5, lost=[f"n{i}" for i in range(6)]), "restart", 0),
        (dead(), history(5, lost=[f"n{i}" for i in range(7)]), "give_up", 93),
        # The same node lost twice is one node.
        (dead(), history(5, lost=["n1"] * 9), "restart", 0),
    ],
)
def test_decision(end: AttemptEnd, past: History, action: str, status: int) -> None:
    decision = decide(end, past, BUDGET)
    assert (decision.action, decision.exit_status) == (action, status)


@pytest.mark.parametrize(
    ("errors", "first", "action"),
    [
        (("boom", "boom"), 1, "give_up"),
        (("boom", "bang"), 1, "restart"),
        (("bang", "boom"), 2, "restart"),
        (("boom",), 1, "restart"),
        (("boom", "boom"), 2, "restart"),
    ],
)
def test_same_user_error_twice_is_hopeless(errors: tuple[str, ...], first: int, action: str) -> None:
    end = dead(message=errors[-1], error_class="user_code")
    past = History(attempts=attempts(*(range(5, 5 + len(errors))), errors=errors), first_of_session=first)
    decision = decide(end, past, BUDGET)
    assert decision.action == action
    assert decision.exit_status == (ExitStatus.FAILED if action == "give_up" else ExitStatus.DONE)


@pytest.mark.parametrize(
    ("nodes", "share", "losable"),
    [(32, 0.2, 6), (10, 0.2, 2), (5, 0.2, 1), (4, 0.2, 0), (1, 0.2, 0), (10, 0.3, 3)],
)
def test_node_budget_is_a_floor_without_rounding_error(nodes: int, share: float, losable: int) -> None:
    assert Budget(nodes=nodes, node_loss=share, restarts_without_progress=3).losable_nodes == losable


@pytest.mark.parametrize(
    ("nodes", "share", "fewest", "losable"),
    [(5, 0.2, 3, 2), (5, 0.2, 5, 1), (5, 0.2, 4, 1), (5, 0.0, 1, 4), (32, 0.2, 20, 12)],
)
def test_a_person_may_allow_more_losses_and_never_fewer(
    nodes: int, share: float, fewest: int, losable: int
) -> None:
    budget = Budget(nodes=nodes, node_loss=share, restarts_without_progress=3, fewest_nodes=fewest)
    assert budget.losable_nodes == losable
    lost = [f"n{index}" for index in range(losable)]
    assert past_budget(lost, budget) is None
    over = past_budget([*lost, "last"], budget)
    assert over is not None and over.short_of_nodes and over.exit_status == 93


def test_back_off_doubles_without_progress_and_is_none_after_progress() -> None:
    def delay(*reached: int) -> float:
        return decide(
            dead(), history(*reached), Budget(nodes=1, node_loss=1.0, restarts_without_progress=99)
        ).delay

    assert delay(5) == 0.0
    assert [delay(*[0] * count) for count in range(1, 5)] == [1.0, 2.0, 4.0, 8.0]
    assert delay(*[5] * 3) == 4.0
    assert delay(*[0] * 20) == 60.0
    assert delay(0, 0, 0, 5) == 0.0


def test_reasons_say_what_happened() -> None:
    assert decide(dead(), history(0, 0, 0, 0), BUDGET).reason == (
        "3 restarts in a row without a newer checkpoint or a higher step; last: rank 1 died"
    )
    lost = decide(dead(), history(5, lost=[f"n{i}" for i in range(7)]), BUDGET)
    assert lost.reason.startswith("7 of 32 nodes lost (n0, n1") and lost.reason.endswith("allows 6")
    assert decide(dead(), history(5), BUDGET) == Decision(action="restart", reason="rank 1 died")


def test_count_of_restarts_without_progress() -> None:
    assert [
        restarts_without_progress(history(*past)) for past in ((), (0,), (0, 0), (3, 3, 3), (3, 3, 4))
    ] == [
        0,
        0,
        1,
        2,
        0,
    ]
