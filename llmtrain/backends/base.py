"""What a backend is: where a run's supervisor lives, which nodes it may use, and the way into each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from llmtrain.config.job import JobSpec
from llmtrain.errors import Problem
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder
from llmtrain.transport.base import Transport

if TYPE_CHECKING:
    from llmtrain.backends.preflight import Report
    from llmtrain.backends.survey import Survey

LEAVING_SECONDS = 30.0
"""How long it is waited for where a job goes that is leaving its nodes."""


class JobState(StrEnum):
    """What became of the thing that was submitted; the bad ends are kept apart, since they ask for different
    answers."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed_out"
    NODE_FAILED = "node_failed"
    OUT_OF_MEMORY = "out_of_memory"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandle:
    """A submitted job: a process of this machine, or a scheduler's job."""

    backend: str
    id: str

    def __str__(self) -> str:
        return f"{self.backend}://{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a job, and the backend's own word for it."""

    state: JobState
    raw: str = ""
    reason: str = ""
    exit_code: int | None = None
    """Of a job that has ended, where it is known; -n: killed by signal n."""
    incarnation: str = ""
    """Which job of a chain, and which start of it, this is about; another one when a run is started again."""
    expected_start: float | None = None
    """Of a job that waits: when the scheduler thinks that it starts; epoch seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine that ranks can run on."""

    name: str
    """As people and `attempt.json` call it; unique in the job."""
    address: str
    """Where the other nodes reach it."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables that its ranks get before those of the profile, e.g. the name of its network interface."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs, where they are known."""
    switch: str = ""
    """The switch that it hangs on, where that is known."""


class Backend(Protocol):
    """One way to start ranks. `check` and `submit` run where the user types, the rest in the supervisor."""

    def check(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Problem]:
        """What would keep this job from starting here; empty when nothing is known.

        `fewest`: nodes that have to be fit, by default those of the profile without its spares.
        """
        ...

    def submit(self, run: RunDir, job: JobFile) -> JobHandle:
        """Start the supervisor of a run whose directory is written. Raises RunError."""
        ...

    def poll(self, handle: JobHandle) -> JobStatus:
        """State of a submitted job."""
        ...

    def cancel(self, handle: JobHandle) -> None:
        """Ask a submitted job to save and leave."""
        ...

    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        """Nodes that the supervisor may use now, in the order of their ranks.

        Raises LlmtrainError when fewer than `fewest` are fit (as for `check`).
        """
        ...

    def transport(self, node: Node) -> Transport:
        """The way into a node."""
        ...

    def agent_python(self, node: Node) -> str:
        """The interpreter that has llmtrain on a node."""
        ...


@runtime_checkable
class SurveyBackend(Protocol):
    """A backend that can look at all its nodes and tell what is wrong with each, refusing nothing."""

    def survey(self, folder: Path, *, write: bool = False) -> Survey:
        """What all nodes say of themselves; with `write`, after a file was written into the folder on each.

        Raises LlmtrainError when there is nothing to look at.
        """
        ...

    def as_nodes(self, reports: Mapping[str, Report]) -> Sequence[Node]:
        """The nodes of some reports."""
        ...


@runtime_checkable
class DistantBackend(Protocol):
    """A backend whose nodes may not see the run's folder of this machine."""

    @property
    def is_distant(self) -> bool:
        """Whether files have to be sent to nodes, and logs fetched."""
        ...


@runtime_checkable
class ReturnBackend(Protocol):
    """A backend that can look at single nodes while a run goes on: whether they have come back."""

    def look_at(self, names: Sequence[str], spec: JobSpec, run: RunDir, *, seconds: float) -> Sequence[Node]:
        """Those of the named nodes that are fit now; the others are left out without an error. Takes hardly
        longer than `seconds`."""
        ...


@runtime_checkable
class PreflightBackend(Protocol):
    """A backend that can look at the nodes of the next attempt in a moment, before ranks start on them."""

    def preflight(self, names: Sequence[str], run: RunDir, *, seconds: float) -> Mapping[str, str]:
        """What is wrong with those of the named nodes that answer and are not fit any more. Takes hardly
        longer than `seconds`."""
        ...


@runtime_checkable
class AllocationBackend(Protocol):
    """A backend whose supervisor runs inside of a scheduler's job, which may end, move, and start again."""

    def allocation(self) -> str:
        """Identity of the job that this process runs in and of its present start; empty outside of a job."""
        ...

    def is_over(self, allocation: str) -> bool:
        """Whether the scheduler has ended that start of that job; False also when nobody knows."""
        ...

    def taken_away(self, names: Sequence[str]) -> Sequence[str]:
        """Those of the named nodes that the scheduler had taken out of the job when `nodes` was asked last;
        no start of ranks in it can use them again."""
        ...

    def orphan_command(self, run: RunDir) -> tuple[str, ...]:
        """What an agent runs when its supervisor has vanished and its ranks have left; empty for nothing."""
        ...


@runtime_checkable
class WatchedBackend(Protocol):
    """A backend whose job goes on, with nobody in charge, when the node of its supervisor is lost."""

    def keep_watch(self, run: RunDir, names: Sequence[str]) -> None:
        """Have some of the named nodes notice that loss, also while no agent runs on them."""
        ...


@runtime_checkable
class RehearsedBackend(Protocol):
    """A backend whose nodes may be lost on purpose."""

    @property
    def is_rehearsed(self) -> bool:
        """Whether they are, which tells other runs nothing about them."""
        ...


def dead_holder(run: RunDir, backend: Backend) -> int | None:
    """Token of the lease's holder when its file looks alive, but the scheduler has ended its job."""
    holder = read_holder(run)
    if holder is None or not holder.is_alive or not isinstance(backend, AllocationBackend):
        return None
    return holder.token if holder.allocation and backend.is_over(holder.allocation) else None
