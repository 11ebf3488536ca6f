"""Processes on this machine; the reference backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from llmtrain.backends.base import JobHandle, JobState, JobStatus, Node
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import JobSpec
from llmtrain.errors import ExitStatus, Problem, RunError, UsageError
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.lease import read_holder, refuse_if_supervised
from llmtrain.transport.base import Transport
from llmtrain.transport.local import LocalTransport

LOOPBACK = "127.0.0.1"


class LocalBackend:
    """The supervisor is a detached process here; all nodes of the profile are this machine."""

    def __init__(self, cluster: ClusterProfile) -> None:
        self._cluster = cluster

    def check(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Problem]:
        """Nothing is asked of this machine beyond what the planner knows."""
        return ()

    def submit(self, run: RunDir, job: JobFile) -> JobHandle:
        """Start the supervisor in a session of its own: it survives logout and the terminal's signals."""
        return start_supervisor(run, backend="local")

    def poll(self, handle: JobHandle) -> JobStatus:
        """Whether the supervisor process runs; how it ended is in the run's record."""
        return poll_supervisor(handle)

    def cancel(self, handle: JobHandle) -> None:
        """SIGTERM to the supervisor."""
        cancel_supervisor(handle)

    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        """As many names for this machine as the profile has nodes."""
        count = self._cluster.nodes
        names = ["localhost"] if count == 1 else [f"localhost-{index}" for index in range(count)]
        return [Node(name=name, address=LOOPBACK) for name in names]

    def transport(self, node: Node) -> Transport:
        """Child processes."""
        return LocalTransport()

    def agent_python(self, node: Node) -> str:
        """This interpreter."""
        return sys.executable


def start_supervisor(run: RunDir, *, backend: str, module: str = "llmtrain.supervise") -> JobHandle:
    """Start a detached supervisor (a Python module) on this machine and wait until it holds the lease.

    Raises UsageError when another supervisor was quicker, RunError, with the end of the log, when it leaves
    for another reason.
    """
    before = read_holder(run)
    with run.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while (holder := read_holder(run)) is None or holder == before or holder.process.pid != process.pid:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(0.02)
            refuse_if_supervised(run)
            kind = UsageError if status == ExitStatus.USAGE else RunError
            raise kind(
                f"the supervisor left with exit code {status} before it began",
                where=str(run.supervisor_log),
                hint=_last_lines(run),
            )
    _CHILDREN[process.pid] = process
    return JobHandle(backend=backend, id=str(process.pid))


def poll_supervisor(handle: JobHandle) -> JobStatus:
    """Whether a supervisor on this machine runs, and its exit code when this process started it."""
    child = _CHILDREN.get(int(handle.id))
    code = None if child is None else child.poll()
    if code is not None:
        state = JobState.SUCCEEDED if code == 0 else JobState.FAILED
        return JobStatus(state=state, raw="exited", exit_code=code)
    try:
        os.kill(int(handle.id), 0)
    except ProcessLookupError:
        return JobStatus(state=JobState.UNKNOWN, raw="gone")
    return JobStatus(state=JobState.RUNNING, raw="running")


def cancel_supervisor(handle: JobHandle) -> None:
    """Ask a supervisor on this machine to save and leave."""
    with suppress(ProcessLookupError):
        os.kill(int(handle.id), signal.SIGTERM)


_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}
"""Supervisors started by this process, kept so that Python neither warns about nor forgets its children."""


def _last_lines(run: RunDir) -> str:
    text = run.supervisor_log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-5:])
