"""What SLURM says about a job, in our words. Pure; the one table of its states.

Output is read by the names of its columns, so that a version that adds, drops or reorders some is no trouble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from llmtrain.backends.base import JobState, JobStatus

LEAVING = "COMPLETING"
"""The state of a job whose processes are gone or being killed, while its nodes are cleaned."""
CONFIGURING = "CONFIGURING"
"""The state of a job whose nodes are booting; its script has not begun."""
SUSPENDED = "SUSPENDED"
"""The state of a job whose processes an administrator has stopped for a while; they hear nothing."""
STATES: Mapping[str, JobState] = {
    "PENDING": JobState.PENDING,
    CONFIGURING: JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    LEAVING: JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    SUSPENDED: JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "BOOT_FAIL": JobState.NODE_FAILED,
    "LAUNCH_FAILED": JobState.NODE_FAILED,
    "RECONFIG_FAIL": JobState.NODE_FAILED,
    "NODE_FAIL": JobState.NODE_FAILED,
    "TIMEOUT": JobState.TIMED_OUT,
    "DEADLINE": JobState.TIMED_OUT,
    "PREEMPTED": JobState.PREEMPTED,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
}
"""Words of squeue(1) and sacct(1), "JOB STATE CODES"."""

ALIVE = (JobState.PENDING, JobState.RUNNING)

HOPELESS_REASONS: Mapping[str, str] = {
    "PartitionNodeLimit": "the partition allows fewer nodes: set nodes in the profile, or another partition",
    "PartitionTimeLimit": "the partition allows less time: set backend.slurm.time, or another partition",
    "PartitionConfig": "the partition cannot hold this job: it has fewer nodes, or other limits",
    "BadConstraints": "no node has all that is asked for: see backend.slurm.constraint and gres",
    "DependencyNeverSatisfied": "the job of backend.slurm.dependency has ended otherwise",
    "AccountNotAllowed": "this account may not use the partition: set backend.slurm.account",
    "QOSNotAllowed": "this quality of service may not be used here: set backend.slurm.qos",
    "InvalidAccount": "`sacctmgr show associations user=$USER` lists your accounts",
    "InvalidQOS": "`sacctmgr show qos` lists them",
}
"""Reasons why a job waits that time alone does not change -> what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job, as far as its row tells."""

    id: str
    """`123`, or `123_4` for a task of an array."""
    state: str
    """SLURM's own word."""
    reason: str = ""
    """Why it waits, or how it ended."""
    start: float | None = None
    """When it started, or will start as SLURM thinks; epoch seconds."""
    restarts: int = 0
    exit_code: int | None = None
    nodes: str = ""
    """Node list, e.g. `node[1-3]`."""
    number: str = ""
    """Id of the task's own, where `id` is that of an array and a task."""

    @property
    def ours(self) -> JobState:
        """The state in our words."""
        return state_of(self.state)

    def status(self) -> JobStatus:
        """What a backend's `poll` says about this job alone."""
        ended = self.ours not in ALIVE
        return JobStatus(
            state=self.ours,
            raw=self.state,
            reason=self.reason,
            exit_code=self.exit_code if ended else None,
            incarnation=f"{self.number or self.id}:{self.restarts}",
            expected_start=self.start if self.ours == JobState.PENDING else None,
        )


def state_of(word: str) -> JobState:
    """Our state of SLURM's word: sacct adds `by 1000` or cuts with `+`, others join flags with commas."""
    first = word.strip().upper().partition(" ")[0].partition(",")[0].rstrip("+*")
    if first in STATES:
        return STATES[first]
    cut = [ours for name, ours in STATES.items() if len(first) > 3 and name.startswith(first)]
    return cut[0] if len(set(cut)) == 1 else JobState.UNKNOWN


def read_table(text: str, separator: str = "|") -> list[dict[str, str]]:
    """Rows of a table whose first line names the columns; names come back in lower case, without `_`."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    names = [name.strip().lower().replace("_", "") for name in lines[0].split(separator)]
    return [
        dict(zip(names, (cell.strip() for cell in line.split(separator)), strict=False)) for line in lines[1:]
    ]


def queue_rows(text: str) -> list[JobRow]:
    """Jobs of squeue's table."""
    return [_queue_row(row) for row in read_table(text) if row.get("state")]


def account_rows(text: str) -> list[JobRow]:
    """Jobs of sacct's table; its exit code is `code:signal`."""
    return [
        JobRow(
            id=row.get("jobid", ""),
            state=row["state"],
            reason=_word(row.get("reason", "")),
            start=_time(row.get("start", "")),
            exit_code=exit_code_of(row.get("exitcode", "")),
            nodes=row.get("nodelist", ""),
        )
        for row in read_table(text)
        if row.get("state")
    ]


def exit_code_of(text: str) -> int | None:
    """Exit code of `code:signal`, or of the wait status that squeue prints; -n: killed by signal n."""
    code, colon, number = text.partition(":")
    if not code.strip().isdigit():
        return None
    if colon:
        return -int(number) if number.isdigit() and int(number) else int(code)
    status = int(code)
    return -(status & 0x7F) if status & 0x7F else status >> 8


def one_of(rows: Sequence[JobRow]) -> JobRow | None:
    """The row that speaks for several jobs of one run: the one that runs, else the next in the queue, else
    the last that ended."""
    for state in (JobState.RUNNING, JobState.PENDING):
        for row in rows:
            if row.ours == state:
                return row
    return max(rows, key=lambda row: row.start or 0.0, default=None)


def _queue_row(row: Mapping[str, str]) -> JobRow:
    base, task = row.get("arrayjobid", ""), row.get("arraytaskid", "")
    is_task = base and task not in ("", "N/A")
    restarts = row.get("restartcount", row.get("restartcnt", ""))
    return JobRow(
        id=f"{base}_{task}" if is_task else row.get("jobid", ""),
        state=row["state"],
        reason=_word(row.get("reason", "")),
        start=_time(row.get("starttime", "")),
        restarts=int(restarts) if restarts.isdigit() else 0,
        exit_code=exit_code_of(row.get("exitcode", "")),
        nodes=_word(row.get("nodelist", "")),
        number=row.get("jobid", ""),
    )


def _word(text: str) -> str:
    return "" if text.lower() in ("none", "n/a", "(null)") else text


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
