"""From nothing to started ranks: agents come up, a rendezvous port is found and reached, node scripts run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from llmtrain import __version__
from llmtrain.agent import messages
from llmtrain.supervise.attempts.crew import Crew
from llmtrain.supervise.detection.detect import Finding, detect
from llmtrain.supervise.detection.limits import Limits

MOST_NEIGHBOURS = 7
"""Next nodes in the order of ranks that each node tries to reach; of few nodes, that is all of them."""


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
        self._ports: dict[int, int] = {}

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
        self._compare_versions()
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

    def _compare_versions(self) -> None:
        """Say when llmtrain was installed anew since this supervisor began, perhaps weeks ago."""
        nodes = self._crew.reports.nodes.values()
        others = {report.hello.version for report in nodes if report.hello} - {__version__}
        if others:
            self._crew.note(
                f"agents are of llmtrain {', '.join(sorted(others))}, this supervisor is of {__version__}: "
                "`llmtrain stop` and `llmtrain resume` put all on one version"
            )

    def _check_ways(self, port: int) -> Finding | None:
        """Whether every node reaches node 0, where ranks meet, and its next neighbours, whom its ranks
        will talk to; names the pairs that fail."""
        count = len(self._crew.plan.nodes)
        others = [(node, 0) for node in range(1, count)]
        finding, failed = self._try_ways(others, {0: port})
        if finding is not None:
            return finding
        if failed:  # By all: it may as well be node 0, or a rule for all.
            return self._blame(failed, [node for node, _ in failed] if len(failed) < len(others) else [])
        if count < 3:
            return None
        self._crew.fleet.send_all(messages.PickPort())
        for report in self._crew.reports.nodes.values():
            report.port = None
        if finding := self._await(lambda: all(each.port for each in self._crew.reports.nodes.values())):
            return finding
        ports = {node: report.port or 0 for node, report in self._crew.reports.nodes.items()}
        for offset in range(1, min(count, MOST_NEIGHBOURS + 1)):
            pairs = [(node, (node + offset) % count) for node in range(count)]
            finding, wrong = self._try_ways(pairs, ports)
            if finding is not None:
                return finding
            failed |= wrong
        if not failed:
            return None
        # The node that most failing pairs have in common; of one pair it could be either.
        ends = Counter(end for pair in failed for end in pair)
        return self._blame(failed, [max(ends, key=lambda node: (ends[node], node))])

    def _try_ways(
        self, pairs: Sequence[tuple[int, int]], ports: Mapping[int, int]
    ) -> tuple[Finding | None, dict[tuple[int, int], str]]:
        """Let the first of each pair knock at the second's door, all at once; pair -> why it failed."""
        crew, reports = self._crew, self._crew.reports.nodes
        for node, target in pairs:
            reports[node].reached = None
            crew.fleet.send(
                node,
                messages.Reach(
                    address=crew.plan.nodes[target].address,
                    port=ports[target],
                    timeout=self._limits.control_call,
                    retries=self._limits.control_retries,
                ),
            )
        finding = self._await(lambda: all(reports[node].reached for node, _ in pairs))
        answers = {pair: reports[pair[0]].reached for pair in pairs}
        self._ports = {**self._ports, **ports}
        return finding, {
            pair: each.error for pair, each in answers.items() if each is not None and each.error
        }

    def _blame(self, failed: Mapping[tuple[int, int], str], blamed: Sequence[int]) -> Finding:
        crew = self._crew
        pairs = "; ".join(
            f"{crew.name(node)} does not reach {crew.name(target)} at {crew.plan.nodes[target].address} "
            f"port {self._ports[target]}: {error}"
            for (node, target), error in failed.items()
        )
        message = f"{pairs} (a firewall between nodes, or inter_node.interface is needed)"
        crew.unreachable = [crew.name(node) for node in blamed]
        node = blamed[0] if blamed else min(failed)[0]
        return Finding(kind="peer_unreachable", message=message, at=time.monotonic(), node=node)

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
        if not standby:  # Those are expected to say nothing, for days.
            self._crew.reports.started = time.monotonic()
