"""The simulated run: attempts, incidents and cures in simulated time.

What is real: the detectors (`watch.py`), the policy (`decide`), the choice of nodes and rungs (`choose`), the
quarantine, the node-loss budget, the back-off of steps up, and the checkpoint interval. What is assumed:
durations and rates (`model.py`, `trace.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmtrain.backends.base import Node
from llmtrain.errors import InfeasibleError
from llmtrain.events.words import GainCause
from llmtrain.plan.save_interval import save_interval
from llmtrain.run.record import AttemptRecord, RunRecord
from llmtrain.supervise.attempts.step_up import REPLACED, STEPPED_UP, may_restart_for_gain, pays
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.decision.failure_rate import expected_between
from llmtrain.supervise.decision.policy import AttemptEnd, Budget, Decision, History, decide, past_budget
from llmtrain.supervise.detection.limits import limits_for
from llmtrain.supervise.nodes.membership import choose, due, quarantine_of, with_losses, with_returned
from llmtrain.supervise.simulation.account import Account
from llmtrain.supervise.simulation.model import Scenario
from llmtrain.supervise.simulation.slow import EXCESS, SlowTimes
from llmtrain.supervise.simulation.trace import Incident, draw_trace
from llmtrain.supervise.simulation.watch import Watch

GAINS = {STEPPED_UP: "step up", REPLACED: "replace a slow node"}
END_SECONDS = 1e-3
"""What rounding leaves of the time is no attempt."""


def simulate(scenario: Scenario, seed: int = 0) -> Account:
    """Play a scenario to its end; the same seed gives the same run."""
    return _Simulation(scenario, seed).run()


class _Simulation:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._given, self._took = scenario, scenario.durations
        self._limits = limits_for(scenario.durations.step)
        trace = draw_trace(scenario.rates, scenario.nodes, scenario.seconds, seed)
        self._incidents: Iterator[Incident] = iter(trace)
        self._next: Incident | None = next(self._incidents, None)
        self._nodes = tuple(Node(name=f"n{index}", address="") for index in range(scenario.nodes))
        self._down: dict[str, float] = {}
        """Node -> when it is repaired."""
        names = tuple(node.name for node in self._nodes)
        self._record = RunRecord(run_id=scenario.name, created=0.0, nodes=names)
        self._budget = Budget(
            nodes=scenario.nodes,
            node_loss=scenario.job.spec.recipe.faults.node_loss_budget,
            restarts_without_progress=scenario.job.spec.recipe.faults.restarts_without_progress,
        )
        self._account = Account(losable=self._budget.losable_nodes)
        self._watch = Watch(scenario.nodes, scenario.durations.step, self._limits, seed)
        self._now = self._done = 0.0
        """The clock, and seconds of training at the planned speed that are not lost."""
        self._first = 1
        replaces = scenario.job.spec.recipe.faults.slow_ranks == "replace"
        self._slow = SlowTimes(replaces=replaces, took=self._took, limits=self._limits)
        self._leave_at = 0.0
        """When the attempt under way is left for a better one if nothing fails."""
        self._leaves_by: GainCause = STEPPED_UP
        self._risk: tuple[float, float] | None = None
        """What the last step up cost, and the speed before it."""

    def run(self) -> Account:
        """All attempts until the time is over."""
        failed_at: float | None = None
        while self._now < self._given.seconds - END_SECONDS:
            plan = self._plan()
            if plan is None:
                continue
            start = self._took.start + self._took.load
            self._spend("start", start)
            if failed_at is not None:
                self._account.recovered.append(self._now - failed_at)
            failed_at = self._attempt(plan)
        return self._account

    # ---- between attempts
    def _plan(self) -> AttemptPlan | None:
        """The next attempt; None when a person had to come first."""
        number = len(self._record.attempts) + 1
        if number != self._first:
            back = [
                name for name in due(self._record, self._now, self._limits.quarantine) if self._is_up(name)
            ]
            if len(self._nodes) - len(self._record.away) < self._planned_nodes:
                self._record = with_returned(self._record, back)
        if past_budget(self._record.lost_nodes, self._budget):
            self._person_resumes("past the budget")
            return None
        try:
            nodes = self._slow.ordered(self._nodes, self._now)
            plan = choose(self._given.job, self._given.rungs, nodes, self._record.away, number=number)
        except InfeasibleError:
            self._person_resumes("nothing fits")
            return None
        self._account.attempts += 1
        return plan

    def _person_resumes(self, why: str) -> None:
        """A run that ended with 93 waits for a person, who takes up every node that is fit."""
        self._account.decisions[f"exit 93: {why}"] += 1
        fit = sum(self._is_up(node.name) for node in self._nodes)
        if why == "nothing fits" and fit >= self._planned_nodes:
            self._account.wrong["gave up although enough nodes were fit"] += 1
        self._spend("waiting for a person", self._took.resume)
        up = [node.name for node in self._nodes if self._is_up(node.name)]
        still = tuple(name for name in self._record.lost_nodes if name not in up)
        self._record = with_returned(replace(self._record, lost_nodes=still), up)
        self._first = len(self._record.attempts) + 1

    @property
    def _planned_nodes(self) -> int:
        return -(-self._given.job.layout.world_size // self._given.job.spec.cluster.gpus_per_node)

    def _is_up(self, name: str) -> bool:
        return self._down.get(name, 0.0) <= self._now

    # ---- one attempt
    def _attempt(self, plan: AttemptPlan) -> float | None:
        """Train until something happens; when that was, if it was a failure."""
        began, speed = self._now, self._given.speed(plan.layout)
        between = expected_between(self._record.attempts, self._given.node_mtbf, len(plan.nodes))
        took = self._took
        interval = save_interval((took.stall,), (took.write,), between)
        self._account.intervals.append(interval)
        self._leave_at = min(self._step_up_at(plan, interval, between), self._given.seconds)
        self._leaves_by = STEPPED_UP
        incident = self._next_that_matters(plan, between)
        end = self._leave_at if incident is None else incident.at
        since = self._now
        trained = max(0.0, end - since)
        saves = int(trained // (interval + took.stall))
        committed = (
            saves * interval
            if saves and trained % (interval + took.stall) >= took.write
            else max(0, saves - 1) * interval
        )
        work = trained - saves * took.stall
        kept = work if incident is None else committed
        self._spend("saving", saves * took.stall)
        self._spend("done again", work - kept)
        self._keep(plan, since, kept, speed)
        self._judge_step_up(speed, trained)
        if incident is not None:
            self._fail(plan, incident, began)
            return incident.at
        if self._now < self._given.seconds - END_SECONDS:
            if self._leaves_by == STEPPED_UP:
                self._risk = (self._took.restart, speed)
            self._leave_for_better(plan, began)
        return None

    def _keep(self, plan: AttemptPlan, since: float, kept: float, speed: float) -> None:
        """Book the seconds of training, from a moment on, that no restart takes back."""
        names = [node.name for node in plan.nodes]
        waited = min(kept, self._slow.cost(names, since, since + kept))
        self._spend("slower by a slow node", waited)
        self._spend("productive", (kept - waited) * speed)
        self._spend("slower on a lower rung", (kept - waited) * (1.0 - speed))
        self._done += (kept - waited) * speed

    def _judge_step_up(self, speed: float, trained: float) -> None:
        """In hindsight: whether the step up before this attempt was worth the restart."""
        if self._risk is not None:
            cost, before = self._risk
            self._account.wrong["step up that did not pay"] += trained * (speed - before) < cost * before
        self._risk = None

    def _step_up_at(self, plan: AttemptPlan, interval: float, between: float) -> float:
        """When the attempt would be ended for one on more nodes; never: infinity."""
        if not plan.rung:
            return float("inf")
        limits, record = self._limits, self._record
        losses = {loss.node: loss for loss in record.losses if loss.is_away}
        moments = sorted(
            max(self._down.get(name, 0.0), loss.since + quarantine_of(loss, limits.quarantine))
            for name, loss in losses.items()
        )
        for moment in moments:
            at = max(moment, self._now) + limits.step_up_look
            while not may_restart_for_gain(record.attempts, at, limits.step_up_back_off):
                at += limits.step_up_look
            back = {
                name
                for name, loss in losses.items()
                if self._down.get(name, 0.0) <= at
                and at >= loss.since + quarantine_of(loss, limits.quarantine)
            }
            away = [name for name in record.away if name not in back]
            better = choose(self._given.job, self._given.rungs, self._nodes, away, number=0)
            batch = self._given.job.spec.recipe.batch.global_size
            is_higher = not better.rung or better.rung > plan.rung
            if is_higher and pays(plan.layout, better.layout, batch, between, self._took.restart):
                return at + min(interval / 2, limits.step_up_wait)
        return float("inf")

    def _node_is_slow(self, plan: AttemptPlan, incident: Incident, between: float) -> None:
        """One of the attempt's nodes becomes slow: it should be named, and may be replaced."""
        name, at = f"n{incident.node}", max(incident.at, self._now)
        place = [node.name for node in plan.nodes].index(name)
        named, others = self._watch.look_at_slow_node(place, EXCESS)
        self._account.wrong["slow node not named"] += not named
        self._account.wrong["other node named as slow"] += others
        self._slow.begin(name, at)
        left_at = self._slow.left_at(at, plan.idle, self._record.attempts, between)
        if named and left_at < self._leave_at:
            self._leave_at, self._leaves_by = left_at, REPLACED

    def _next_that_matters(self, plan: AttemptPlan, between: float) -> Incident | None:
        """The first failure of the attempt's nodes before it is left; what happens to others is noted, and
        what is no failure must not be taken for one."""
        places = {node.name: place for place, node in enumerate(plan.nodes)}
        while self._next is not None and self._next.at < self._leave_at:
            incident, self._next = self._next, next(self._incidents, None)
            name = f"n{incident.node}"
            if not self._happened_up(name, incident.at):
                continue
            self._account.incidents[incident.kind] += 1
            if incident.kind == "node":
                self._down[name] = incident.at + incident.repair
            if name not in places:
                continue
            if incident.kind == "slow_node":
                self._node_is_slow(plan, incident, between)
            elif incident.kind == "slow_save":
                if self._watch.look(incident, places[name]).finding is not None:
                    self._account.wrong["false alarm"] += 1
            else:
                # What happened while the ranks started is found when they are there.
                return replace(incident, at=max(incident.at, self._now))
        return None

    def _happened_up(self, name: str, at: float) -> bool:
        return self._down.get(name, 0.0) <= at

    def _fail(self, plan: AttemptPlan, incident: Incident, began: float) -> None:
        place = [node.name for node in plan.nodes].index(f"n{incident.node}")
        seen = self._watch.look(incident, place)
        finding = seen.finding
        if finding is None:
            self._account.wrong["failure never found"] += 1
        elif finding.node is not None and finding.node != place:
            self._account.wrong["another node blamed"] += 1
        self._account.detected.setdefault(incident.kind, []).append(seen.seconds)
        self._spend("detecting", seen.seconds)
        self._spend("tearing down", self._took.tear_down)
        name = f"n{incident.node}"
        why = finding.message if finding else ""
        if incident.kind == "node":
            self._record = with_losses(self._record, [name], why, self._now)
            self._account.most_lost = max(self._account.most_lost, len(self._record.lost_nodes))
        end = AttemptEnd(outcome="failed", cause=finding.kind if finding else "", message=why)
        self._decided(plan, end, began)

    def _leave_for_better(self, plan: AttemptPlan, began: float) -> None:
        self._spend("saving", self._took.write)
        self._spend("tearing down", self._took.tear_down)
        end = AttemptEnd(outcome="stopped", cause=self._leaves_by, gain=GAINS[self._leaves_by])
        self._decided(plan, end, began)

    def _decided(self, plan: AttemptPlan, end: AttemptEnd, began: float) -> None:
        steps = int(self._done / self._took.step)
        attempt = AttemptRecord(
            number=plan.number,
            started=began,
            ended=self._now,
            outcome=end.outcome,
            cause=end.cause,
            error=end.message,
            reached_step=steps + 1,
            committed_step=steps,
        )
        self._record = self._record.with_attempt(attempt)
        decision = self._decide(end)
        self._account.decisions[end.gain or decision.action] += 1
        if decision.action == "restart":
            self._spend("back-off", decision.delay)
        elif not decision.short_of_nodes:
            self._account.wrong[f"{decision.action}: {decision.reason[:60]}"] += 1
            self._person_resumes("no progress")

    def _decide(self, end: AttemptEnd) -> Decision:
        # Only what the rules look back on: the run's last attempts.
        history = History(
            attempts=self._record.attempts[-16:],
            first_of_session=self._first,
            lost_nodes=self._record.lost_nodes,
        )
        return decide(end, history, self._budget)

    def _spend(self, part: str, seconds: float) -> None:
        self._account.spend(part, seconds)
        self._now += seconds
