"""One attempt: start the agents, start the ranks, watch, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.agent import messages
from llmtrain.backends.base import Backend, Node
from llmtrain.config.layout import Layout
from llmtrain.events.schema import Found, Notice
from llmtrain.events.state import RunState, apply
from llmtrain.events.writer import EventWriter
from llmtrain.run.layout import RunDir
from llmtrain.supervise.control import Control
from llmtrain.supervise.detect import Finding, detect, ended_well
from llmtrain.supervise.fleet import Fleet, sweep_nodes, wait_until
from llmtrain.supervise.limits import Limits
from llmtrain.supervise.policy import AttemptEnd
from llmtrain.supervise.reports import NodeReport, Reports

TICK_SECONDS = 0.2
SETTLE_SECONDS = 0.5
"""How long a finding that is more likely a consequence waits for its cause."""
PAUSE_SECONDS = 5.0
"""A gap in the supervisor's own loop that means it was suspended, and not that everybody fell silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """What an attempt runs."""

    number: int
    layout: Layout
    nodes: tuple[Node, ...]
    ranks_on_node: tuple[int, ...]
    rung: int = 0
    """Nodes that the rung of the ladder is made for; 0: the planned layout."""
    idle: tuple[str, ...] = ()
    """Names of nodes that are left and not used."""
    membership: str = ""
    """Why it runs on other nodes or in another layout than planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """How an attempt went."""

    end: AttemptEnd
    reached_step: int
    committed_step: int
    unreachable: tuple[str, ...] = ()
    """Nodes whose agent did not come up."""


class AttemptRunner:
    """Runs one attempt to its end; `renew` is called every second and raises when the lease is lost."""

    def __init__(
        self,
        run: RunDir,
        plan: AttemptPlan,
        backend: Backend,
        *,
        limits: Limits,
        control: Control,
        writer: EventWriter,
        renew: Callable[[], None],
        environment: dict[str, str],
        when_orphaned: tuple[str, ...] = (),
    ) -> None:
        self._run_dir, self._plan, self._backend = run, plan, backend
        self._limits, self._control, self._writer = limits, control, writer
        self._renew, self._environment = renew, environment
        self._when_orphaned = when_orphaned
        self._fleet = Fleet(run, plan.number, backend, plan.nodes)
        self._reports = Reports(attempt=plan.number, world_size=plan.layout.world_size)
        self._state = RunState()
        self._pinged = self._looked = time.monotonic()
        self._unreachable: list[str] = []
        self._stop_grace: float | None = None
        self._has_lease = True

    def run(self) -> AttemptResult:
        """Start, watch and tear down; whatever happens, nothing is left running that could be ended."""
        finding: Finding | None = None
        try:
            finding = self._start() or self._watch()
            if finding is not None:
                self._emit_finding(finding)
        finally:
            self._tear_down(finding)
        return self._result(finding)

    # ---- start
    def _start(self) -> Finding | None:
        now = time.monotonic()
        for index, node in enumerate(self._plan.nodes):
            self._reports.nodes[index] = NodeReport(node=index, name=node.name, opened=now, heard=now)
        failed = self._fleet.open()
        if failed:
            self._unreachable = [self._plan.nodes[index].name for index in sorted(failed)]
            index, why = min(failed.items())
            message = f"node {self._plan.nodes[index].name} cannot be reached: {why}"
            return Finding(kind="node_unreachable", message=message, at=now, node=index)
        nodes = self._reports.nodes.values()
        if finding := self._await(lambda: all(report.hello for report in nodes)):
            return finding
        self._fleet.send(0, messages.PickPort())
        if finding := self._await(lambda: self._reports.nodes[0].port is not None):
            return finding
        port = self._reports.nodes[0].port or 0
        if finding := self._check_ways(port):
            return finding
        if self._control.wish() is None:
            self._start_ranks(port)
        return None

    def _check_ways(self, port: int) -> Finding | None:
        """Whether every node reaches node 0, where all ranks will meet; names the pairs that fail."""
        first, others = self._plan.nodes[0], list(self._reports.nodes.values())[1:]
        for report in others:
            self._fleet.send(report.node, messages.Reach(address=first.address, port=port))
        if finding := self._await(lambda: all(report.reached for report in others)):
            return finding
        failed = [report for report in others if report.reached is not None and report.reached.error]
        if not failed:
            return None
        if len(failed) < len(others):  # Otherwise it may as well be node 0, or a rule for all.
            self._unreachable = [report.name for report in failed]
        pairs = "; ".join(
            f"{report.name} does not reach {first.name} at {first.address} port {port}: "
            f"{report.reached.error if report.reached else ''}"
            for report in failed
        )
        message = f"{pairs} (a firewall between nodes, or inter_node.interface is needed)"
        return Finding(kind="peer_unreachable", message=message, at=time.monotonic(), node=failed[0].node)

    def _await(self, done: Callable[[], bool]) -> Finding | None:
        """Pump until something is done, wrong, or a stop is wanted."""
        while not done() and self._control.wish() is None:
            self._pump(TICK_SECONDS)
            found = detect(self._state, self._reports, self._limits, time.monotonic())
            if found:
                self._unreachable = [
                    self._plan.nodes[finding.node].name for finding in found if finding.node is not None
                ]
                return found[0]
        return None

    def _start_ranks(self, port: int) -> None:
        first_rank = 0
        for index, ranks in enumerate(self._plan.ranks_on_node):
            start = messages.Start(
                attempt=self._plan.number,
                node=index,
                nodes=len(self._plan.nodes),
                ranks=ranks,
                first_rank=first_rank,
                address=self._plan.nodes[0].address,
                port=port,
                grace=self._limits.save,
                environment={**self._plan.nodes[index].environment, **self._environment},
                when_orphaned=self._when_orphaned,
            )
            first_rank += ranks
            self._fleet.send(index, start)
        self._reports.started = time.monotonic()

    # ---- watch
    def _watch(self) -> Finding | None:
        """The finding that ends the attempt; None when its ranks left in order, or when a stop is wanted."""
        while self._reports.started is not None:
            self._pump(TICK_SECONDS)
            found = detect(self._state, self._reports, self._limits, time.monotonic())
            if found and not self._may_be_an_echo(found[0]):
                return found[0]
            if ended_well(self._reports) or self._control.wish() is not None:
                return None
        return None

    def _may_be_an_echo(self, finding: Finding) -> bool:
        """Whether the cause of a consequence may still be on its way."""
        return finding.is_echo and time.monotonic() - finding.at < SETTLE_SECONDS

    def _pump(self, timeout: float) -> None:
        """Take in what the agents say, for at most so long; ping them and keep the lease, when it is due."""
        arrived = list(self._fleet.receive(timeout))
        self._forgive_own_pause()
        for node, message in arrived:
            event = self._reports.observe(node, message, time.monotonic())
            if event is not None:
                self._state = apply(self._state, event)
        while self._reports.notes:
            self._writer.emit(Notice(message=self._reports.notes.pop(0), level="warning"))
        self._looked = now = time.monotonic()
        if now - self._pinged >= messages.HEARTBEAT_SECONDS:
            self._pinged = now
            self._fleet.send_all(messages.Ping())
            self._keep_lease()

    def _keep_lease(self) -> None:
        """Renew the lease; once it is lost, only the tear-down goes on."""
        if self._has_lease:
            self._has_lease = False
            self._renew()
            self._has_lease = True

    def _forgive_own_pause(self) -> None:
        gap = time.monotonic() - self._looked
        if gap > PAUSE_SECONDS:
            self._reports.forgive(gap)

    # ---- the end
    def _tear_down(self, finding: Finding | None) -> None:
        if finding is not None and finding.kind == "hang":
            self._fleet.send_all(messages.DumpStacks())
            wait_until(lambda: False, self._limits.stacks, self._pump)
        if finding is None and self._reports.started is not None and not ended_well(self._reports):
            self._stop_as_asked()
        self._fleet.send_all(messages.Stop(grace=0.0))
        wait_until(self._all_gone, self._limits.tear_down, self._pump)
        self._fleet.cut()
        unclean = [
            self._plan.nodes[index]
            for index, report in self._reports.nodes.items()
            if (report.gone is None or report.gone.left) and report.name not in self._unreachable
        ]
        # An agent that nobody saw end, on a node that cannot be reached either: the node is lost.
        vanished = [node for node in unclean if self._fleet.exit_code(self._plan.nodes.index(node)) is None]
        unreachable = self._sweep(unclean)
        self._unreachable += [node.name for node in vanished if node.name in unreachable]

    def _stop_as_asked(self) -> None:
        """Ask the ranks to save and leave; a stronger wish that comes meanwhile hastens them."""
        deadline = 0.0
        while not self._all_gone():
            wish = self._control.wish()
            if wish is not None and (self._stop_grace is None or wish < self._stop_grace):
                self._stop_grace = wish
                self._fleet.send_all(messages.Stop(grace=wish))
                deadline = time.monotonic() + wish + self._limits.tear_down
            if time.monotonic() > deadline:
                return
            self._pump(TICK_SECONDS)

    def _all_gone(self) -> bool:
        return all(report.gone or report.closed for report in self._reports.nodes.values())

    def _sweep(self, nodes: Sequence[Node]) -> set[str]:
        """End what is left on nodes; names of those that cannot be reached."""
        older_than = self._plan.number + 1
        swept, failed = sweep_nodes(self._run_dir, self._backend, nodes, older_than=older_than, grace=0.0)
        for name, word in {**swept, **failed}.items():
            self._writer.emit(Notice(message=f"{name}: {word}", level="warning"))
        return set(failed)

    def _emit_finding(self, finding: Finding) -> None:
        self._writer.emit(
            Found(finding=finding.kind, message=finding.message, rank=finding.rank, node=finding.node)
        )

    def _result(self, finding: Finding | None) -> AttemptResult:
        attempts = {attempt.number: attempt for attempt in self._state.attempts}
        own = attempts.get(self._plan.number)
        checkpoints = [point.step for point in self._state.checkpoints]
        return AttemptResult(
            end=self._end(finding),
            reached_step=(own.last_step or 0) if own is not None else 0,
            committed_step=max(checkpoints, default=0),
            unreachable=tuple(self._unreachable),
        )

    def _end(self, finding: Finding | None) -> AttemptEnd:
        stop_wanted = self._control.wish() is not None
        ended = ended_well(self._reports)
        if finding is None and ended is not None:
            outcome: Literal["completed", "stopped"] = "stopped" if ended == "stopped" else "completed"
            return AttemptEnd(outcome=outcome, stop_wanted=stop_wanted)
        if finding is None:
            return AttemptEnd(
                outcome="failed", stop_wanted=stop_wanted, cause="stop", message=self._why_nothing_saved()
            )
        return AttemptEnd(
            outcome="failed",
            stop_wanted=stop_wanted,
            cause=finding.kind,
            message=finding.message,
            error_class=finding.error_class,
            step=finding.step,
        )

    def _why_nothing_saved(self) -> str:
        if self._reports.started is None or not self._reports.pids:
            return "no rank had been started"
        if self._stop_grace == 0.0:
            return "the ranks were killed at once"
        died = [end for end in self._reports.ends.values() if end.exit_code != 0 and not end.killed]
        if died:
            return "ranks ended before they could save"
        return f"the ranks did not leave within {self._stop_grace or 0.0:g} s and were killed"
