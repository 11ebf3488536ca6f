"""What the supervisor and an agent say to each other: one JSON object a line, `{"type": ..., fields}`.

Either side skips types and fields that it does not know, so that the two may differ in version.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

HEARTBEAT_SECONDS = 1.0
"""How often each side says something; the supervisor pings, the agent answers."""
TICK_SECONDS = 0.2
"""Longest wait of each side for the other's word before it looks at what else is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages."""

    type: ClassVar[str] = ""


# ---- supervisor to agent
@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Message):
    """Run the node script."""

    type: ClassVar[str] = "start"
    attempt: int
    node: int
    """Node rank, from 0."""
    nodes: int
    ranks: int
    """Ranks on this node."""
    first_rank: int
    address: str
    """Where the rendezvous store listens (node 0)."""
    port: int
    grace: float
    """Seconds that the ranks get to save when the supervisor goes silent or away."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables passed through from the launching shell; never written to a file."""
    when_orphaned: tuple[str, ...] = ()
    """Command to run when the supervisor vanished without a word, once the ranks have left."""
    standby: bool = False
    """Whether the ranks are to wait, ready to join each other, for `Go`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Go(Message):
    """Let ranks in standby go on: the attempt that they were started for begins."""

    type: ClassVar[str] = "go"
    grace: float
    """As in `Start`."""
    when_orphaned: tuple[str, ...] = ()
    """As in `Start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPort(Message):
    """Name a TCP port that is free on the agent's node, and listen on it until `Start`."""

    type: ClassVar[str] = "pick_port"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach(Message):
    """Try whether a port of another node can be reached from the agent's."""

    type: ClassVar[str] = "reach"
    address: str
    port: int
    timeout: float
    """Seconds that one try may take."""
    retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """What do you see? Answered with `Alive` at once."""

    type: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Ask the ranks to save and leave; kill what is left after `grace` seconds (0: at once)."""

    type: ClassVar[str] = "stop"
    grace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Message):
    """What is each of your ranks doing, and what does the kernel say? Answered with `Seen`."""

    type: ClassVar[str] = "look"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks(Message):
    """Send the ranks SIGUSR1, on which faulthandler writes their stacks."""

    type: ClassVar[str] = "dump_stacks"


# ---- agent to supervisor
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First line of an agent."""

    type: ClassVar[str] = "hello"
    host: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Port(Message):
    """Answer to `PickPort`."""

    type: ClassVar[str] = "port"
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached(Message):
    """Answer to `Reach`."""

    type: ClassVar[str] = "reached"
    error: str
    """Why not; empty when it was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(Message):
    """Answer to a `Start` in standby that the node has no room for."""

    type: ClassVar[str] = "declined"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(Message):
    """Answer to `Ping`."""

    type: ClassVar[str] = "alive"
    ranks: tuple[int, ...]
    """Global ranks whose processes run."""
    stage: str
    """idle | standby | running | leaving | gone"""
    quiet: float | None = None
    """Seconds since a rank of this node entered or left a collective, did something else, or read or wrote
    storage; None where that cannot be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Message):
    """Answer to `Look`; sent without being asked when a rank ends badly."""

    type: ClassVar[str] = "seen"
    ranks: tuple[Mapping[str, Any], ...] = ()
    """What can be seen of each rank (`agent/pulse.py`)."""
    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log since the ranks were started that tell of GPU errors or of processes killed
    for memory."""
    oom_kills: int = 0
    """Processes of this node's control group that were killed for memory since the ranks were started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpawned(Message):
    """A rank's process was seen."""

    type: ClassVar[str] = "rank_spawned"
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded(Message):
    """A rank's process ended."""

    type: ClassVar[str] = "rank_ended"
    rank: int
    pid: int
    exit_code: int | None
    """-n: killed by signal n; None when nobody knows."""
    lines: tuple[str, ...] = ()
    """The end of its log, unless it left with 0."""
    asked: bool = False
    """Whether it had been asked to leave before."""
    killed: bool = False
    """Whether the agent killed it, or it died with its torchrun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed(Message):
    """An event line that a rank or the agent wrote on this node."""

    type: ClassVar[str] = "relayed"
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnded(Message):
    """The node script (torchrun) ended."""

    type: ClassVar[str] = "script_ended"
    exit_code: int
    lines: tuple[str, ...] = ()
    """The end of its log, unless it left with 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Message):
    """Somebody else than the supervisor told the agent to leave, by a signal: its ranks save and leave."""

    type: ClassVar[str] = "told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(Message):
    """The agent leaves; nothing of the attempt runs on its node but `left`, pids that would not die."""

    type: ClassVar[str] = "gone"
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Message):
    """Something a person should know."""

    type: ClassVar[str] = "note"
    message: str


def encode(message: Message) -> bytes:
    """One line, without its newline."""
    return json.dumps({"type": message.type, **dataclasses.asdict(message)}).encode("ascii")


def decode(line: bytes) -> Message | None:
    """The message of a line; None for anything else (a login banner, a newer version's message)."""
    try:
        raw = json.loads(line)
        cls = _classes().get(raw["type"])
        if cls is None:
            return None
        names = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: _frozen(value) for name, value in raw.items() if name in names})
    except (ValueError, TypeError, KeyError):
        return None


@cache
def _classes() -> dict[str, type[Message]]:
    return {cls.type: cls for cls in Message.__subclasses__()}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
