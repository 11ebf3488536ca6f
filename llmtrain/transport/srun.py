"""Nodes of a SLURM job, through one `srun` step each: the step's standard input and output are the channel.

Every step says all that it needs. The variables of the batch script still describe the job as it began, and
srun takes them for orders; after a node was lost they are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.transport.base import Completed, OnLine, TransportError
from llmtrain.transport.local import LocalChannel, LocalTransport

LAUNCH_ERROR_LINES = 5
STEP_HINTS: Mapping[str, str] = {
    "confirm allocation": "the job has ended; `llmtrain resume RUN` submits another",
    "already completing": "the job has ended; `llmtrain resume RUN` submits another",
    "job has expired": "its time is over; `llmtrain resume RUN` submits another job",
    "credential expired": "the nodes' clocks differ: synchronise them (chrony)",
    "munge": "the service that vouches for users is down there: `systemctl status munged`",
    "unable to resolve": "the node's name is not known here: `scontrol show node NODE` has its NodeAddr",
    "node failure": "SLURM has lost the node: `scontrol show node NODE` says why",
    "requested node configuration is not available": "the step asks for more than the job has: srun_args",
}
"""What srun says when it does not start a step -> what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What all steps of a job have in common."""

    job: str
    """Id of the job."""
    arguments: tuple[str, ...] = ()
    """Further arguments of srun."""
    bind: bool = True
    """Whether this SLURM binds tasks to cores, so that it must be told not to."""
    wrapper: tuple[str, ...] = ()
    """Command that runs the step's own command, e.g. in a container."""


class SrunTransport:
    """The way to one node of the job that this process runs in."""

    def __init__(self, node: str, settings: StepSettings) -> None:
        self._node, self._settings = node, settings
        self._local = LocalTransport()

    def command(self, argv: Sequence[str]) -> list[str]:
        """The whole command that runs `argv` on the node."""
        settings = self._settings
        return [
            "srun",
            # No talk on standard error but errors.
            "--quiet",
            f"--jobid={settings.job}",
            f"--nodelist={self._node}",
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",
            # Beside whatever else runs: a half-ended step of an earlier attempt would block this one.
            "--overlap",
            # The one task of the step starts all ranks of the node: it must not be bound to the cores of one.
            *(("--cpu-bind=none",) if settings.bind else ()),
            # When a task ends, nothing else is to happen.
            "--kill-on-bad-exit=0",
            "--export=ALL",
            *settings.arguments,
            *settings.wrapper,
            *argv,
        ]

    def run(self, argv: Sequence[str], *, timeout: float, stdin: bytes = b"") -> Completed:
        """Run a command to its end; see `Transport.run`."""
        done = self._local.run(self.command(argv), timeout=timeout, stdin=stdin)
        if done.exit_code and not done.stdout and b"srun: error:" in done.stderr:
            words = done.stderr.decode("utf-8", "replace").strip().splitlines()[-LAUNCH_ERROR_LINES:]
            said = "; ".join(words)
            message = f"SLURM did not start `{argv[0]}` on {self._node}: {said}"
            raise TransportError(message, hint=step_hint(said))
        return Completed(argv=tuple(argv), exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    def open(
        self, argv: Sequence[str], *, on_line: OnLine, stderr: Path, environment: Mapping[str, str]
    ) -> LocalChannel:
        """Start a process to talk to; see `Transport.open`."""
        return self._local.open(self.command(argv), on_line=on_line, stderr=stderr, environment=environment)

    def put(self, path: Path, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file; the folder of runs is shared by all nodes."""
        self._local.put(path, data, mode=mode)

    def get(self, path: Path, *, limit: int) -> bytes:
        """The last `limit` bytes of a file; the folder of runs is shared by all nodes."""
        return self._local.get(path, limit=limit)

    def close(self) -> None:
        """Nothing to let go: a step ends with its channel."""


def step_hint(said: str) -> str:
    """What to do when srun has said this; empty when nobody knows."""
    return next((hint for words, hint in STEP_HINTS.items() if words in said.lower()), "")
