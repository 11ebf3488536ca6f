"""What the agents of one attempt have said so far. Filled by `observe`; `detect` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmtrain.agent import messages
from llmtrain.events.event import Event, decode_line
from llmtrain.events.schema import RankFailed, RankFinished
from llmtrain.supervise.detection.evidence import RankEvidence, parse_evidence
from llmtrain.supervise.detection.pace import Pace

JITTER_SECONDS = 0.5
"""Delay of a message that does not make a moment another one."""


@dataclass(slots=True, kw_only=True)
class NodeReport:
    """One node, as its agent tells it. Times are the supervisor's monotonic clock."""

    node: int
    name: str
    opened: float
    """When its channel was opened."""
    heard: float
    """Last line from its agent."""
    hello: messages.Hello | None = None
    port: int | None = None
    reached: messages.Reached | None = None
    """Whether the node gets through to the rendezvous port of node 0."""
    declined: str = ""
    """Why it would not start ranks in standby."""
    closed: float | None = None
    """When its channel ended."""
    script_ended: messages.ScriptEnded | None = None
    script_ended_at: float = 0.0
    is_told: bool = False
    """Whether somebody else told its agent to leave."""
    gone: messages.Gone | None = None
    moved: float | None = None
    """When one of its ranks was seen last to do something; None where that cannot be seen."""
    looked: float = 0.0
    """When its agent told last what it sees."""
    kernel: tuple[str, ...] = ()
    """The kernel's lines worth telling."""
    oom_kills: int = 0
    """Processes of its control group killed for memory."""

    def take_leave(self, message: messages.Told | messages.Gone) -> None:
        """Its agent was told to leave, or does."""
        if isinstance(message, messages.Gone):
            self.gone = message
        else:
            self.is_told = True

    def take_sight(self, message: messages.Alive | messages.Seen, now: float) -> None:
        """Take in what its agent sees."""
        if isinstance(message, messages.Seen):
            self.looked, self.kernel, self.oom_kills = now, message.kernel, message.oom_kills
        elif message.quiet is not None:
            moved = now - message.quiet
            # The same moment comes back with every message, as early or late as the message is.
            if self.moved is None or moved > self.moved + JITTER_SECONDS:
                self.moved = moved


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """A rank's process ended."""

    rank: int
    node: int
    exit_code: int | None
    at: float
    asked: bool
    killed: bool
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """A rank said that it fails."""

    rank: int
    payload: RankFailed
    at: float


@dataclass(slots=True, kw_only=True)
class Reports:
    """All nodes and ranks of one attempt."""

    attempt: int
    world_size: int
    nodes: dict[int, NodeReport] = field(default_factory=dict)
    node_of: dict[int, int] = field(default_factory=dict)
    """Rank -> node rank."""
    pids: dict[int, int] = field(default_factory=dict)
    """Rank -> process id on its node."""
    ends: dict[int, RankEnd] = field(default_factory=dict)
    errors: dict[int, RankError] = field(default_factory=dict)
    finished: dict[int, RankFinished] = field(default_factory=dict)
    started: float | None = None
    """When the node scripts were started."""
    last_event: float | None = None
    """When the last event of any rank arrived."""
    notes: list[str] = field(default_factory=list)
    """What agents want a person to know; taken away by the caller."""
    evidence: dict[int, RankEvidence] = field(default_factory=dict)
    """Rank -> what its agent saw last."""
    pace: Pace = field(default_factory=Pace)
    """How long steps and phases take."""

    @property
    def last_sign(self) -> float | None:
        """When any rank showed last that it lives: by an event, or seen from outside. None before the first
        event."""
        if self.last_event is None:
            return None
        moved = [report.moved for report in self.nodes.values() if report.moved is not None]
        return max([self.last_event, *moved])

    def are_all_told(self) -> bool:
        """Whether all agents were told to leave by somebody else, as a scheduler does that ends a job."""
        return bool(self.nodes) and all(report.is_told for report in self.nodes.values())

    def observe(self, node: int, message: messages.Message | None, now: float) -> Event | None:
        """Take in one line of a node, None at the end of its channel; returns a relayed event to fold."""
        report = self.nodes[node]
        if message is None:
            report.closed = now
            return None
        report.heard = now
        match message:
            case messages.Hello():
                report.hello = message
            case messages.Port(port=port):
                report.port = port
            case messages.Reached():
                report.reached = message
            case messages.Declined(reason=reason):
                report.declined = reason
            case messages.RankSpawned(rank=rank, pid=pid):
                self.pids[rank], self.node_of[rank] = pid, node
            case messages.RankEnded():
                self._rank_ended(node, message, now)
            case messages.ScriptEnded():
                report.script_ended, report.script_ended_at = message, now
            case messages.Told() | messages.Gone():
                report.take_leave(message)
            case messages.Alive() | messages.Seen():
                report.take_sight(message, now)
                self._take_evidence(message)
            case messages.Note(message=text):
                self.notes.append(f"{report.name}: {text}")
            case messages.Relayed(line=line):
                return self._relayed(line, now)
        return None

    def forgive(self, seconds: float) -> None:
        """Move all clocks on by a time in which the supervisor itself did not run (suspended, stopped)."""
        for report in self.nodes.values():
            report.heard += seconds
            if report.moved is not None:
                report.moved += seconds
        if self.last_event is not None:
            self.last_event += seconds
        if self.started is not None:
            self.started += seconds

    def _take_evidence(self, message: messages.Alive | messages.Seen) -> None:
        for raw in message.ranks if isinstance(message, messages.Seen) else ():
            found = parse_evidence(raw)
            if found is not None:
                self.evidence[found.rank] = found

    def _rank_ended(self, node: int, message: messages.RankEnded, now: float) -> None:
        self.node_of[message.rank] = node
        known = self.ends.get(message.rank)
        self.ends[message.rank] = RankEnd(
            rank=message.rank,
            node=node,
            exit_code=message.exit_code,
            at=now if known is None else known.at,
            asked=message.asked,
            killed=message.killed,
            lines=message.lines,
        )

    def _relayed(self, line: str, now: float) -> Event | None:
        event = decode_line(line.encode())
        if event is None or event.attempt != self.attempt:
            return None
        if event.source == "rank" and event.rank is not None:
            self.last_event = now
            self.pace.observe(event)
            match event.payload:
                case RankFailed() as payload:
                    self.errors.setdefault(event.rank, RankError(rank=event.rank, payload=payload, at=now))
                case RankFinished() as payload:
                    self.finished[event.rank] = payload
        return event
