"""From what was reported to what is wrong. Pure: a function of state, reports, limits and time.

The first finding is the cause. When one rank dies, its peers fail in the collective that it left, often
within milliseconds and with errors that blame each other; so a rank that was killed, or that failed in its
own code, comes before any communication error, and only then does time decide.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.events.state import RunState
from llmtrain.events.words import ErrorClass, FindingKind, LeavesAs
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.detection.reports import NodeReport, RankEnd, Reports

UNEXPLAINED_SECONDS = 2.0
"""A rank that vanished may have finished: its node script's exit code tells, a moment later."""

COMMUNICATION: ErrorClass = "communication"
CHATTER = re.compile(r"\[[IW]\d{4} \d\d:\d\d:\d\d")
"""How torch's C++ parts begin their notes and warnings, e.g. on names that do not resolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    message: str
    at: float
    """When it became known, by the supervisor's monotonic clock."""
    rank: int | None = None
    node: int | None = None
    error_class: ErrorClass | Literal[""] = ""
    """Of `rank_failed`: the class that the rank gave (`RankFailed.error_class`)."""
    step: int = 0
    """Of `rank_failed`: the step that it was in."""
    is_echo: bool = False
    """Whether it is more likely a consequence than a cause."""
    silent: float = 0.0
    """Of `hang`: seconds without a sign of life."""
    limit: float = 0.0
    """Of `hang`: seconds that were allowed."""


def detect(state: RunState, reports: Reports, limits: Limits, now: float) -> tuple[Finding, ...]:
    """All findings, the cause first; empty when nothing is known to be wrong."""
    found = [
        *_ranks(reports, now),
        *_launchers(reports),
        *_agents(reports, limits, now),
        *_silence(state, reports, limits, now),
    ]
    return tuple(sorted(found, key=lambda finding: (finding.is_echo, finding.at, finding.rank or 0)))


def ended_well(reports: Reports, *, stop_wanted: bool = False) -> LeavesAs | None:
    """Why the ranks left when every node script left with 0 and ranks have said so, else None.

    When a stop is wanted the word of all ranks is enough: a scheduler's signal kills torchrun, whose ranks
    leave in order, and those that were in the last step have completed.
    """
    reasons = {payload.reason for payload in reports.finished.values()}
    all_said = stop_wanted and len(reports.finished) == reports.world_size
    if not (reasons and (all_said or _left_in_order(reports))):
        return None  # Ranks in standby that gave up waiting leave with 0, too, and have not finished.
    return "stopped" if "stopped" in reasons else "completed"


def _left_in_order(reports: Reports) -> bool:
    scripts = [report.script_ended for report in reports.nodes.values()]
    return bool(scripts) and all(script is not None and script.exit_code == 0 for script in scripts)


def _ranks(reports: Reports, now: float) -> Iterator[Finding]:
    for rank in sorted(reports.ends.keys() | reports.errors.keys()):
        error, end = reports.errors.get(rank), reports.ends.get(rank)
        if error is not None:
            payload = error.payload
            where = f"in step {payload.step}" if payload.step else "before its first step"
            yield Finding(
                kind="rank_failed",
                message=f"rank {rank} failed {where}: {payload.error}",
                at=error.at,
                rank=rank,
                node=reports.node_of.get(rank),
                error_class=payload.error_class,
                step=payload.step,
                is_echo=payload.error_class == COMMUNICATION,
            )
        elif end is not None and not (end.asked or end.killed) and _is_death(end, reports, now):
            yield _death(end, reports)


def _is_death(end: RankEnd, reports: Reports, now: float) -> bool:
    if end.exit_code is not None:
        return end.exit_code != 0
    peers_suffer = any(error.payload.error_class == COMMUNICATION for error in reports.errors.values())
    return end.rank not in reports.finished and (peers_suffer or now - end.at > UNEXPLAINED_SECONDS)


def _death(end: RankEnd, reports: Reports) -> Finding:
    name = reports.nodes[end.node].name
    how = "vanished" if end.exit_code is None else describe_exit(end.exit_code)
    last = _last_words(end.lines)
    tail = f"; its last words: {last}" if last else ""
    # torchrun ends the peers of a failed worker with SIGTERM.
    return Finding(
        kind="rank_dead",
        message=f"rank {end.rank} on {name} {how}{tail}",
        at=end.at,
        rank=end.rank,
        node=end.node,
        is_echo=end.exit_code == -signal.SIGTERM,
    )


def _last_words(lines: Sequence[str]) -> str:
    """The last line that may say why a process ended; "" when there is none."""
    return next((line for line in reversed(lines) if line.strip() and not CHATTER.match(line)), "")


def _launchers(reports: Reports) -> Iterator[Finding]:
    if _left_in_order(reports) and not reports.finished:
        yield Finding(
            kind="launcher_failed",
            message="all node scripts left with 0, but no rank said that it has finished",
            at=max(report.script_ended_at for report in reports.nodes.values()),
            is_echo=True,
        )
    for report in reports.nodes.values():
        script = report.script_ended
        if script is not None and script.exit_code != 0:
            tail = f"; last line of its log: {script.lines[-1]}" if script.lines else ""
            # A killed torchrun takes its ranks along, so it is the cause; one that exits reports a cause.
            yield Finding(
                kind="launcher_failed",
                message=f"the node script on {report.name} {describe_exit(script.exit_code)}{tail}",
                at=report.script_ended_at,
                node=report.node,
                is_echo=script.exit_code > 0,
            )


def _agents(reports: Reports, limits: Limits, now: float) -> Iterator[Finding]:
    for report in reports.nodes.values():
        if report.gone is not None:
            continue
        if report.closed is not None:
            yield _node_finding(report, "agent_lost", "the channel to its agent ended", report.closed)
        elif report.hello is None and now - report.opened > limits.agents_up:
            yield _node_finding(
                report, "start_timeout", f"its agent said nothing for {limits.agents_up:g} s", now
            )
        elif report.hello is not None and now - report.heard > limits.node_silence:
            yield _node_finding(
                report, "node_silent", f"its agent has been silent for {now - report.heard:.1f} s", now
            )


def _node_finding(report: NodeReport, kind: FindingKind, what: str, at: float) -> Finding:
    return Finding(kind=kind, message=f"node {report.name}: {what}", at=at, node=report.node)


def _silence(state: RunState, reports: Reports, limits: Limits, now: float) -> Iterator[Finding]:
    """Ranks that live and do nothing: no event of any rank for longer than its phase allows."""
    if reports.started is None or all(report.script_ended for report in reports.nodes.values()):
        return
    if reports.last_event is None:
        if now - reports.started > limits.ranks_up:
            message = f"no rank said anything within {limits.ranks_up:g} s"
            yield Finding(kind="start_timeout", message=message, at=now)
        return
    busy = [rank for rank in state.ranks.values() if rank.rank not in reports.finished]
    if not busy:
        return
    newest = max(busy, key=lambda rank: (rank.last_seen, rank.phase_time))
    generous = limits.phase(newest.phase)
    # What ranks are seen to do between two events puts off the limit that follows from measured times; the
    # generous one allows for no more events than it says.
    silent, limit = now - (reports.last_sign or now), reports.pace.limit(newest.phase, generous)
    if now - reports.last_event > generous:
        silent, limit = now - reports.last_event, generous
    if silent > limit:
        late = min(busy, key=lambda rank: (rank.step, rank.last_seen))
        message = (
            f"no rank has finished anything for {silent:.0f} s in phase `{newest.phase}` "
            f"(limit {limit:.3g} s); "
            f"furthest behind: rank {late.rank}, in phase `{late.phase}` of step {late.step}"
        )
        yield Finding(kind="hang", message=message, at=now, rank=late.rank, silent=silent, limit=limit)


def describe_exit(code: int) -> str:
    """`was killed by SIGKILL (128 + 9)` or `left with exit code 1`."""
    if code >= 0:
        return f"left with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name} (exit code {128 - code})"
