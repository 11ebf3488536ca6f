"""Every path of a run, and only here."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """`attempts/<n>/`: one start of ranks."""

    path: Path

    @property
    def number(self) -> int:
        """Attempt number, from 1."""
        return int(self.path.name)

    @property
    def attempt_json(self) -> Path:
        """What this attempt runs: layout, nodes, where it restores from (`run/job_file.py`)."""
        return self.path / "attempt.json"

    @property
    def events(self) -> Path:
        """Event files, one per writer: `rank-00000.jsonl`, `agent-000.jsonl`, `supervisor.jsonl`."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        """Log files: `rank-00000.log` (stdout and stderr of a rank), `node-000.log` (node script, torchrun),
        `agent-000.log`."""
        return self.path / "logs"

    @property
    def stacks(self) -> Path:
        """Folder of stack dumps: `rank-00000.txt`."""
        return self.path / "stacks"

    @property
    def trace(self) -> Path:
        """Folder of traced steps: `rank-00000.json` (`events/trace.py`); none when no step was traced."""
        return self.path / "trace"

    @property
    def out_of_memory(self) -> Path:
        """Folder of what ranks that ran out of memory left: `rank-00000.json` (`run/memory_file.py`)."""
        return self.path / "out-of-memory"

    def rank_trace(self, rank: int) -> Path:
        """Trace of a rank's passes, for chrome://tracing and Perfetto."""
        return self.trace / f"rank-{rank:05d}.json"

    @property
    def post_mortem_json(self) -> Path:
        """Why the attempt ended, for programs (`supervise/explanation/`); only of one that failed."""
        return self.path / "post_mortem.json"

    @property
    def post_mortem_text(self) -> Path:
        """The same for people."""
        return self.path / "post_mortem.txt"

    def rank_events(self, rank: int) -> Path:
        """Event file of a rank."""
        return self.events / f"rank-{rank:05d}.jsonl"

    def rank_log(self, rank: int) -> Path:
        """Log of a rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def rank_stacks(self, rank: int) -> Path:
        """Stack dumps of a rank."""
        return self.stacks / f"rank-{rank:05d}.txt"

    def node_log(self, node: int) -> Path:
        """Output of a node script."""
        return self.logs / f"node-{node:03d}.log"

    def standby_log(self, node: int) -> Path:
        """Output of the next attempt's node script while its ranks wait in standby; it becomes that attempt's
        `node_log` when they are let go."""
        return self.logs / f"standby-{node:03d}.log"

    def standby_agent_log(self, node: int) -> Path:
        """Standard error of the agent of ranks in standby for the next attempt."""
        return self.logs / f"standby-agent-{node:03d}.log"

    def agent_events(self, node: int) -> Path:
        """Event file of a node's agent."""
        return self.events / f"agent-{node:03d}.jsonl"

    def agent_log(self, node: int) -> Path:
        """Standard error of a node's agent; empty unless something went wrong."""
        return self.logs / f"agent-{node:03d}.log"

    @property
    def supervisor_events(self) -> Path:
        """Event file of the supervisor."""
        return self.events / "supervisor.jsonl"


@dataclass(frozen=True, slots=True)
class RunDir:
    """`runs/<run-id>/`: everything that explains a run."""

    path: Path

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def argument(self) -> str:
        """The folder as it is typed on a command line, quoted where a shell needs it."""
        return shlex.quote(str(self.path))

    @property
    def job_json(self) -> Path:
        """The frozen job spec (`run/job_file.py`)."""
        return self.path / "job.json"

    @property
    def plan_json(self) -> Path:
        """The plan, as `plan --json` prints it."""
        return self.path / "plan.json"

    @property
    def allowance_json(self) -> Path:
        """A person's word to go on with fewer nodes than the budget allows (`run/ladder_file.py`)."""
        return self.path / "allowance.json"

    @property
    def scripts(self) -> Path:
        """Rendered scripts."""
        return self.path / "scripts"

    @property
    def record_json(self) -> Path:
        """State that outlives the supervisor: attempts, outcome (`run/record.py`)."""
        return self.path / "record.json"

    @property
    def submission_json(self) -> Path:
        """The scheduler's jobs that were submitted last (`run/submission.py`)."""
        return self.path / "submission.json"

    @property
    def requeues(self) -> Path:
        """Folder of claims: who queued which job again, so that only one does."""
        return self.path / "requeues"

    @property
    def lease(self) -> Path:
        """Folder that says which supervisor may write (`run/lease.py`)."""
        return self.path / "lease"

    @property
    def stop_file(self) -> Path:
        """Asks the supervisor to stop: `save` (at the next step boundary) or `now`."""
        return self.path / "STOP"

    @property
    def checkpoints(self) -> Path:
        """Folder of `step-*/` (`run/checkpoints/`)."""
        return self.path / "checkpoints"

    def rescued(self, snapshot: str) -> Path:
        """Where shards of a snapshot lie that nodes without ranks had to give (`run/snapshots.py`)."""
        return self.path / "rescued" / snapshot

    @property
    def remote_json(self) -> Path:
        """Where the run really lives, if not here (`run/remote.py`)."""
        return self.path / "remote.json"

    @property
    def data_json(self) -> Path:
        """Where the prepared corpus of this run lies, and its digest (`run/data_file.py`)."""
        return self.path / "data.json"

    @property
    def attempts(self) -> Path:
        """Folder of attempts."""
        return self.path / "attempts"

    @property
    def supervisor_log(self) -> Path:
        """Standard output and error of the detached supervisor."""
        return self.path / "supervisor.log"

    @property
    def metrics_log(self) -> Path:
        """What the process that offers metrics beside the supervisor printed."""
        return self.path / "metrics.log"

    def attempt(self, number: int) -> AttemptDir:
        """Folder of one attempt."""
        return AttemptDir(self.attempts / str(number))

    def attempt_numbers(self) -> list[int]:
        """Numbers of all attempts on disk, ascending."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.attempts.iterdir() if entry.name.isdigit())
