"""From nothing to started ranks: agents come up, a rendezvous port is found and reached, node scripts run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from llmtrain.agent import messages
from llmtrain.supervise.crew import Crew
from llmtrain.supervise.detect import Finding, detect
from llmtrain.supervise.limits import Limits


class StartUp:
    """Starts the ranks of one attempt; a wish to stop ends it between two steps, without a finding."""

    def __init__(
        self,
        crew: Crew,
        limits: Limits,
        *,
        environment: Mapping[str, str],
        when_orphaned: tuple[str, ...] = (),
        is_stop_wanted: Callable[[], bool],
    ) -> None:
        self._crew, self._limits = crew, limits
        self._environment, self._when_orphaned = environment, when_orphaned
        self._is_stop_wanted = is_stop_wanted

    def start(self, *, standby: bool = False) -> Finding | None:
        """Start everything; what went wrong, or None. In standby the ranks wait for `release`."""
        crew = self._crew
        failed = crew.open()
        if failed:
            crew.unreachable = [crew.name(index) for index in sorted(failed)]
            index, why = min(failed.items())
            message = f"node {crew.name(index)} cannot be reached: {why}"
            return Finding(kind="node_unreachable", message=message, at=time.monotonic(), node=index)
        nodes = crew.reports.nodes.values()
        if finding := self._await(lambda: all(report.hello for report in nodes)):
            return finding
        crew.fleet.send(0, messages.PickPort())
        if finding := self._await(lambda: crew.reports.nodes[0].port is not None):
            return finding
        port = crew.reports.nodes[0].port or 0
        if finding := self._check_ways(port):
            return finding
        if not self._is_stop_wanted():
            self._start_ranks(port, standby)
        return None

    def release(self) -> None:
        """Let ranks in standby go on, as if they had been started now."""
        go = messages.Go(grace=self._limits.save, when_orphaned=self._when_orphaned)
        self._crew.fleet.send_all(go)
        self._crew.reports.started = time.monotonic()

    def _check_ways(self, port: int) -> Finding | None:
        """Whether every node reaches node 0, where all ranks will meet; names the pairs that fail."""
        crew = self._crew
        first, others = crew.plan.nodes[0], list(crew.reports.nodes.values())[1:]
        for report in others:
            crew.fleet.send(report.node, messages.Reach(address=first.address, port=port))
        if finding := self._await(lambda: all(report.reached for report in others)):
            return finding
        failed = [report for report in others if report.reached is not None and report.reached.error]
        if not failed:
            return None
        if len(failed) < len(others):  # Otherwise it may as well be node 0, or a rule for all.
            crew.unreachable = [report.name for report in failed]
        pairs = "; ".join(
            f"{report.name} does not reach {first.name} at {first.address} port {port}: "
            f"{report.reached.error if report.reached else ''}"
            for report in failed
        )
        message = f"{pairs} (a firewall between nodes, or inter_node.interface is needed)"
        return Finding(kind="peer_unreachable", message=message, at=time.monotonic(), node=failed[0].node)

    def _await(self, done: Callable[[], bool]) -> Finding | None:
        """Pump until something is done, wrong, or a stop is wanted."""
        crew = self._crew
        while not done() and not self._is_stop_wanted():
            crew.pump()
            found = detect(crew.state, crew.reports, self._limits, time.monotonic())
            if found:
                crew.unreachable = [crew.name(finding.node) for finding in found if finding.node is not None]
                return found[0]
        return None

    def _start_ranks(self, port: int, standby: bool) -> None:
        plan, first_rank = self._crew.plan, 0
        for index, ranks in enumerate(plan.ranks_on_node):
            start = messages.Start(
                attempt=plan.number,
                node=index,
                nodes=len(plan.nodes),
                ranks=ranks,
                first_rank=first_rank,
                address=plan.nodes[0].address,
                port=port,
                grace=0.0 if standby else self._limits.save,
                environment={**plan.nodes[index].environment, **self._environment},
                when_orphaned=() if standby else self._when_orphaned,
                standby=standby,
            )
            first_rank += ranks
            self._crew.fleet.send(index, start)
        self._crew.reports.started = time.monotonic()
