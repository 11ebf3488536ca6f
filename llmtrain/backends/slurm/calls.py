"""The commands of SLURM: with a time limit, output read by named columns, refusals as our errors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.backends.slurm.refusals import (
    SlurmAbsentError,
    SlurmError,
    SlurmUnconfiguredError,
    SlurmUnreachableError,
    no_answer,
    refusal,
    refuse_unreadable,
)
from llmtrain.backends.slurm.states import JobRow, account_rows, one_of, queue_rows
from llmtrain.config.hosts import expand_entry
from llmtrain.errors import ConfigError
from llmtrain.transport.base import Transport, TransportError

QUEUE_COLUMNS = (
    "JobID", "ArrayJobID", "ArrayTaskID", "State", "Reason", "StartTime", "RestartCnt", "exit_code",
    "NodeList",
)  # fmt: skip
ACCOUNT_COLUMNS = ("JobID", "State", "ExitCode", "Reason", "Start", "NodeList")

_JOB_ID = re.compile(r"(\d+)(?:;(\S+))?")
_NODE_FIELD = re.compile(r"(?:^|\s)(NodeName|NodeAddr|NodeHostName|State)=(\S+)")
NOBODY_HEARS = ("invalid job id", "already completing", "pending execution", "no such process")
"""What scancel says of a signal to a job that is just ending, was queued again, or has not begun."""
BAD_NODE_STATES = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "ERROR", "REBOOT")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node, as SLURM sees it."""

    name: str
    address: str
    """NodeAddr: where SLURM itself reaches it."""
    state: str
    """E.g. `IDLE`, `MIXED+DRAIN`, `DOWN*`."""

    @property
    def is_well(self) -> bool:
        """Whether SLURM hears of it."""
        return not self.state.endswith("*") and not any(word in self.state for word in BAD_NODE_STATES)


class SlurmCalls:
    """SLURM's commands, run over a transport: on this machine, or on a login node."""

    def __init__(self, transport: Transport, timeout: float, configuration: str = "") -> None:
        """`configuration`: what SLURM_CONF names, where the commands run on this machine and a person waits;
        it is looked at before the first of them."""
        self._transport, self.timeout, self._configuration = transport, timeout, configuration

    def submit(self, script: str, without: Sequence[str] = ()) -> str:
        """Submit a script; the job's id. Raises ConfigError when the profile is to blame, else SlurmError.

        sbatch does not see the variables named in `without`, and so the job does not.
        """
        hidden = [word for name in without for word in ("-u", name)]
        text = self._run(*(("env", *hidden) if hidden else ()), "sbatch", "--parsable", script)
        for line in text.splitlines():
            if match := _JOB_ID.fullmatch(line.strip()):
                return match[1]
        raise SlurmError(f"sbatch gave no job id, but {text.strip()!r}")

    def queue(self, jobs: Sequence[str]) -> list[JobRow]:
        """Those of the jobs that the controller still knows, ended ones too. Raises SlurmError."""
        columns = ",".join(f"{name}:|" for name in QUEUE_COLUMNS)
        try:
            return queue_rows(self._run("squeue", "--states=all", f"--jobs={','.join(jobs)}", "-O", columns))
        except SlurmUnreachableError:
            raise
        except SlurmError as error:
            if "invalid job id" in str(error).lower():
                return []
            raise

    def settled(
        self, jobs: Sequence[str], seconds: float, is_leaving: Callable[[JobRow], bool]
    ) -> JobRow | None:
        """The job of a chain whose turn it is; one that is leaving is given so long to be gone.
        None: the controller knows none of them. Raises SlurmError."""
        given_up = time.monotonic() + seconds
        while (row := one_of(self.queue(jobs))) and is_leaving(row) and time.monotonic() < given_up:
            time.sleep(1.0)
        return row

    def named(self, name: str) -> list[JobRow]:
        """Jobs of a name. Raises SlurmError."""
        columns = ",".join(f"{column}:|" for column in QUEUE_COLUMNS)
        return queue_rows(self._run("squeue", "--states=all", f"--name={name}", "-O", columns))

    def account(self, jobs: Sequence[str]) -> list[JobRow]:
        """What accounting knows of jobs; [] where there is no accounting."""
        columns = ",".join(ACCOUNT_COLUMNS)
        try:
            arguments = ("--allocations", "--parsable2", f"--jobs={','.join(jobs)}", f"--format={columns}")
            return account_rows(self._run("sacct", *arguments))
        except SlurmError:
            return []

    def requeue(self, job: str) -> None:
        """Queue a running job again: all that it runs is killed. Raises SlurmError."""
        self._run("scontrol", "requeue", job)

    def cancel(self, job: str, *, pending_only: bool = False) -> None:
        """Cancel a job; one that is not there any more is no error."""
        try:
            self._run("scancel", *(("--state=PENDING",) if pending_only else ()), job)
        except SlurmUnreachableError:
            raise
        except SlurmError as error:
            if "invalid job id" not in str(error).lower():
                raise

    def signal_batch(self, job: str, name: str) -> None:
        """Send a signal to a job's batch script alone; one that has ended, or not begun, is no error."""
        try:
            self._run("scancel", "--batch", f"--signal={name}", job)
        except SlurmUnreachableError:
            raise
        except SlurmError as error:
            if not any(words in str(error).lower() for words in NOBODY_HEARS):
                raise

    def hostnames(self, node_list: str) -> list[str]:
        """Names in a node list, in order; expanded by SLURM itself, or by us when it does not answer."""
        try:
            names = self._run("scontrol", "show", "hostnames", node_list).split()
        except SlurmError:
            names = []
        return names or [host.name for host in expand_entry(node_list, "")[0]]

    def nodes(self, node_list: str) -> dict[str, NodeRow]:
        """Nodes by name; {} when SLURM does not answer."""
        try:
            text = self._run("scontrol", "--oneliner", "show", "node", node_list)
        except SlurmError:
            return {}
        return {row.name: row for line in text.splitlines() if (row := _node_row(line)) is not None}

    def switches(self) -> dict[str, tuple[str, ...]]:
        """Leaf switch -> its nodes; {} when SLURM knows of none, or does not answer."""
        try:
            return leaf_switches(self._run("scontrol", "--oneliner", "show", "topology"))
        except (SlurmError, ConfigError):
            return {}

    def partitions(self) -> list[str]:
        """Names of all partitions, hidden ones too; [] when they are not told. Raises SlurmUnreachableError,
        and SlurmUnconfiguredError."""
        try:
            return sorted(set(self._run("sinfo", "--all", "--noheader", "--format=%R").split()))
        except SlurmAbsentError:
            return []
        except (SlurmUnreachableError, SlurmUnconfiguredError):
            raise
        except (SlurmError, ConfigError):
            return []

    def controller_answers(self) -> bool:
        """Whether one of the controllers is up."""
        try:
            return " is UP" in self._run("scontrol", "ping")
        except (SlurmError, ConfigError):
            return False

    def binds_tasks(self) -> bool:
        """Whether tasks are bound to cores; True also when SLURM does not answer."""
        try:
            text = self._run("scontrol", "show", "config")
        except SlurmError:
            return True
        found = re.search(r"^TaskPlugin\s*=\s*(\S+)", text, re.MULTILINE)
        return found is None or found[1] not in ("task/none", "(null)")

    def _run(self, *argv: str) -> str:
        """Standard output of a command; raises SlurmError or ConfigError."""
        if self._configuration:
            refuse_unreadable(self._configuration)
            self._configuration = ""  # Later its disk may be away for a while: that is no reason to end.
        try:
            done = self._transport.run(argv, timeout=self.timeout)
        except TransportError as error:
            raise no_answer(str(error)) from error
        stdout, stderr = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        if done.exit_code:
            raise refusal("sbatch" if "sbatch" in argv else argv[0], stderr or stdout)
        return stdout


def leaf_switches(text: str) -> dict[str, tuple[str, ...]]:
    """`SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]` lines; switches of switches are left out."""
    found = {}
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("Level") == "0" and "SwitchName" in fields and "Nodes" in fields:
            hosts, _ = expand_entry(fields["Nodes"], "")
            found[fields["SwitchName"]] = tuple(host.name for host in hosts)
    return found


def _node_row(line: str) -> NodeRow | None:
    found: dict[str, str] = dict(_NODE_FIELD.findall(line))
    if "NodeName" not in found:
        return None
    name = found["NodeName"]
    address = found.get("NodeAddr", found.get("NodeHostName", name))
    return NodeRow(name=name, address=address, state=found.get("State", ""))
