"""What holds for the policy whatever happens: seeded stories of failures, losses and returns, without ranks.

Each story plays the records, rungs and rules that a supervisor uses, in its order, with ranks that are drawn.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmtrain.errors import ExitStatus, InfeasibleError
from llmtrain.plan.ladder import lowest_rung
from llmtrain.run.job_file import JobFile
from llmtrain.run.ladder_file import FrozenRung
from llmtrain.run.record import AttemptRecord, RunRecord
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.decision.policy import AttemptEnd, Budget, Decision, History, decide, past_budget
from llmtrain.supervise.nodes.membership import choose, due, with_losses, with_returned
from tests.supervise.test_membership import job, layout, nodes, rung

STORIES, STEPS, PATIENCE, QUARANTINE = 150, 12, 3, 60.0
ENDS = {"finish": {0}, "stop": {75}, "give_up": {1, 93}}
"""Exit codes of every action but `restart`."""


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.5, 0.999])
def test_the_budget_ends_where_the_ladder_does(share: float) -> None:
    for count in [*range(1, 300), 2000, 2048]:
        allowed = Budget(nodes=count, node_loss=share, restarts_without_progress=3).losable_nodes
        assert 0 <= allowed < count or (count, allowed) == (1, 0)
        assert count - allowed == lowest_rung(count, share), (count, share)


@pytest.mark.parametrize(
    ("count", "allowed"), [(1, 0), (2, 0), (4, 0), (5, 1), (9, 1), (10, 2), (14, 2), (15, 3)]
)
def test_a_fifth_rounded_down(count: int, allowed: int) -> None:
    assert Budget(nodes=count, node_loss=0.2, restarts_without_progress=3).losable_nodes == allowed


class Story:
    """A run of drawn failures, decided as its supervisor would."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(1, 12)
        share = self.random.choice([0.0, 0.2, 0.4, 0.6])
        spares = self.random.randint(0, self.count // 3)
        self.job: JobFile = job(self.count - spares, nodes=self.count, spares=spares)
        self.budget = Budget(nodes=self.count, node_loss=share, restarts_without_progress=PATIENCE)
        lowest = lowest_rung(self.count, share)
        self.rungs: tuple[FrozenRung, ...] = tuple(
            rung(left, layout(min(left, self.count - spares))) for left in range(self.count, lowest - 1, -1)
        )
        names = tuple(f"n{index}" for index in range(1, self.count + 1))
        self.record = RunRecord(run_id="r", created=0.0, nodes=names)
        self.now, self.reached, self.saved = 0.0, 0, 0
        self.ever_lost: set[str] = set()

    def play(self) -> Decision:
        """Attempts until the run ends."""
        while True:
            if self.record.attempts:
                self._look_again()
            if (end := past_budget(self.record.lost_nodes, self.budget)) is not None:
                return end
            decision = self._decide(self._attempt(self._plan()))
            if decision.action != "restart":
                return decision
            assert decision.exit_status == ExitStatus.DONE and 0.0 <= decision.delay <= 60.0
            self.now += decision.delay + self.random.choice([1.0, 100.0, 4000.0])

    def _look_again(self) -> None:
        back = [name for name in due(self.record, self.now, QUARANTINE) if self.random.random() < 0.5]
        self.record = with_returned(self.record, back)

    def _plan(self) -> AttemptPlan:
        number = len(self.record.attempts) + 1
        return choose(self.job, self.rungs, nodes(self.count), self.record.away, number=number)

    def _attempt(self, plan: AttemptPlan) -> AttemptEnd:
        used = [node.name for node in plan.nodes]
        assert not set(used) & set(self.record.away), "a node in quarantine is not used"
        assert len(used) == len(set(used)) == plan.layout.dp
        first = self.saved
        step = min(STEPS, first + self.random.choice([0, 0, 0, 1, 2, 5]))
        saved = self.saved = max(first, self.random.choice([first, first, step]))
        kind = (
            "completed" if step == STEPS else self.random.choice(["failed"] * 6 + ["stopped", "lost", "lost"])
        )
        lost = (
            self.random.sample(used, min(len(used), self.random.choice([1, 1, 2]))) if kind == "lost" else []
        )
        self.ever_lost.update(lost)
        ended = AttemptRecord(
            number=plan.number,
            started=self.now,
            ended=self.now,
            outcome="failed" if kind == "lost" else kind,  # type: ignore[arg-type]
            reached_step=step if step > first else 0,
            committed_step=saved if saved > first else 0,
        )
        self.record = with_losses(self.record.with_attempt(ended), [*lost, *lost], "gone", self.now)
        gain = "n1 is back" if kind == "stopped" and self.random.random() < 0.7 else ""
        return AttemptEnd(outcome=ended.outcome, message=kind, gain=gain)  # type: ignore[arg-type]

    def _decide(self, end: AttemptEnd) -> Decision:
        history = History(
            attempts=self.record.attempts, first_of_session=1, lost_nodes=self.record.lost_nodes
        )
        return decide(end, history, self.budget)


def test_stories_end_as_they_must() -> None:
    seen: dict[str, int] = {}
    for seed in range(STORIES):
        story = Story(seed)
        try:
            decision = story.play()
        except InfeasibleError as error:
            # Not past the budget, so the ladder has a rung for those that are left.
            pytest.fail(f"seed {seed}: {error}")
        attempts = story.record.attempts
        assert decision.exit_status in ENDS[decision.action], (seed, decision)
        assert len(attempts) <= 2 * STEPS * (PATIENCE + 1), f"seed {seed}: restarts for ever"
        lost = story.record.lost_nodes
        assert len(lost) == len(set(lost)) and set(lost) == story.ever_lost, "distinct nodes, each once"
        over = len(lost) > story.budget.losable_nodes
        assert (decision.exit_status == ExitStatus.DO_NOT_RESTART and decision.short_of_nodes) == over or (
            decision.action in ("finish", "stop") and over
        ), (seed, decision)
        seen[f"{decision.action} {over}"] = seen.get(f"{decision.action} {over}", 0) + 1
    assert {"finish False", "stop False", "give_up False", "give_up True"} <= seen.keys(), seen


def test_quarantine_always_lifts() -> None:
    record = RunRecord(run_id="r", created=0.0, nodes=("n1",))
    for times in range(1, 40):
        record = with_losses(record, ["n1"], "gone", 1000.0 * times)
        assert record.away == ("n1",) and record.lost_nodes == ("n1",)
        assert not due(record, 1000.0 * times + 1.0, QUARANTINE)
        assert due(record, 1000.0 * times + 32 * QUARANTINE, QUARANTINE) == ("n1",)
        # Whatever a clock says that is set back by years: it is not for ever.
        assert due(replace(record), -1e9, QUARANTINE) == ("n1",)
        record = with_returned(record, ["n1"])
        assert not record.away
