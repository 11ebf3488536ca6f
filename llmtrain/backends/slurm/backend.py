"""SLURM: jobs are submitted where the user types; inside of a job, nodes are reached through steps.

The environment of a batch script tells how the job began. Which nodes it has now, only the controller knows,
and the controller may be slow, restarting or gone: every call has a time limit, and the last answer stands in
for a missing one.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmtrain.backends.base import JobHandle, JobState, JobStatus, Node
from llmtrain.backends.preflight import Report, gpus_promised
from llmtrain.backends.slurm.calls import SlurmCalls
from llmtrain.backends.slurm.login import folder_there, is_elsewhere, problems_there, push, way_to
from llmtrain.backends.slurm.nodes import as_nodes, fit_nodes, survey_nodes
from llmtrain.backends.slurm.reach import known_partitions
from llmtrain.backends.slurm.refusals import SlurmError
from llmtrain.backends.slurm.states import CONFIGURING, LEAVING, one_of
from llmtrain.backends.slurm.steps import step_settings
from llmtrain.backends.slurm.submit import hidden_variables, refuse_second, submit_jobs
from llmtrain.backends.slurm.watch import Lookouts
from llmtrain.backends.survey import Survey
from llmtrain.backends.switches import profile_switches, with_switches
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import JobSpec
from llmtrain.config.slurm import python_of_ranks, slurm_config
from llmtrain.errors import Problem
from llmtrain.render.slurm import BATCH_SCRIPT
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.submission import Submission, write_submission
from llmtrain.transport.base import Transport
from llmtrain.transport.local import LocalTransport
from llmtrain.transport.srun import SrunTransport, StepSettings

POLL_SECONDS = 2.0
"""Shortest time between two questions about a job; what is asked more often gets the last answer."""


class SlurmBackend:
    """`check`, `submit`, `poll` and `cancel` run on a login node, the rest in the batch step of a job."""

    def __init__(
        self,
        cluster: ClusterProfile,
        *,
        calls: SlurmCalls | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._config = slurm_config(cluster.backend.slurm)
        self._environment = os.environ if environment is None else environment
        self._is_elsewhere = is_elsewhere(cluster, self._environment)
        self._way = way_to(self._config.login) if self._is_elsewhere else LocalTransport()
        # In a job a disk that is away is waited for, by limited calls.
        is_typed_here = not self._is_elsewhere and "SLURM_JOB_ID" not in self._environment
        configuration = self._environment.get("SLURM_CONF", "") if is_typed_here else ""
        self._calls = calls or SlurmCalls(self._way, self._config.timeout, configuration)
        self._polled, self._status = float("-inf"), JobStatus(state=JobState.PENDING)
        self._node_list, self._began = "", False
        self._lookouts: Lookouts | None = None
        self._binds: bool | None = None
        self._switches: Mapping[str, Sequence[str]] | None = None

    # ---- where the user types
    def check(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Problem]:
        """Whether this is a place to submit from, and whether the partition exists. Raises UsageError when a
        job of this run is in the queue, SlurmError when SLURM does not answer."""
        if self._is_elsewhere:
            python = self._cluster.backend.python
            if problems := problems_there(self._way, self._config.login, python, run):
                return problems
        elif shutil.which("sbatch") is None:
            hint = "launch on a login node of the cluster, or load the module that brings SLURM's commands"
            return [Problem("backend.kind", "there is no `sbatch` on this machine", hint)]
        known = known_partitions(self._calls)
        refuse_second(self._calls, run)
        wanted = [name for name in self._config.partition.split(",") if name]
        return [
            Problem(
                "backend.slurm.partition", f"there is no partition `{name}`", f"known: {', '.join(known)}"
            )
            for name in wanted
            if known and name not in known
        ]

    def submit(self, run: RunDir, job: JobFile) -> JobHandle:
        """Submit the batch script, once for each job of a singleton chain.

        Raises UsageError when jobs of this run are still in the queue, ConfigError when the profile asks for
        what the cluster will never give, else SlurmError.
        """
        refuse_second(self._calls, run)
        there = folder_there(self._cluster, run) if self._is_elsewhere else run
        if self._is_elsewhere:
            push(self._way, run, there)
        name = self._config.job_name or job.run_id
        count = self._config.chain_length if self._config.chain == "singleton" else 1
        passed = self._cluster.environment.pass_through
        # Variables of another machine's shell need no hiding.
        hidden = [] if self._is_elsewhere else hidden_variables(self._config, self._environment, passed)
        jobs = submit_jobs(self._calls, str(there.scripts / BATCH_SCRIPT), name, count, hidden)
        submission = Submission(backend="slurm", jobs=tuple(jobs), name=name, submitted=time.time())
        write_submission(run, submission)
        if self._is_elsewhere:
            self._way.put(there.submission_json, run.submission_json.read_bytes())
        return JobHandle(backend="slurm", id=",".join(jobs))

    def poll(self, handle: JobHandle) -> JobStatus:
        """State of a job; of a chain, that of the job whose turn it is."""
        now = time.monotonic()
        if now - self._polled >= POLL_SECONDS:
            self._polled = now
            self._status = self._ask(handle.id.split(","))
        return self._status

    def cancel(self, handle: JobHandle) -> None:
        """Take jobs that wait out of the queue; the one that runs is told to save and leave."""
        for job in handle.id.split(","):
            self._calls.cancel(job, pending_only=True)
        for row in self._calls.queue(handle.id.split(",")):
            # By its own number: scancel fails, without a word, on a task of an array.
            number = row.number or row.id
            if row.state == CONFIGURING:
                self._calls.cancel(number)  # Its nodes boot: there is nothing yet to be told.
            elif row.ours == JobState.RUNNING and row.state != LEAVING:
                self._calls.signal_batch(number, "TERM")

    def _ask(self, jobs: Sequence[str]) -> JobStatus:
        try:
            row = one_of(self._calls.queue(jobs)) or one_of(self._calls.account(jobs))
        except SlurmError as error:
            # Jobs go on while the controller is away.
            return replace(self._status, reason=str(error))
        if row is not None:
            return row.status()
        return JobStatus(state=JobState.UNKNOWN, raw="gone", reason="SLURM does not know the job any more")

    # ---- inside of a job
    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        """Nodes that the job has now and that are fit; PreflightError when a job starts with too few."""
        at_first = spec.cluster.nodes - spec.cluster.spares if fewest is None else fewest
        needed = 1 if self._began else at_first
        nodes = self._placed(fit_nodes(self.survey(run.path), needed=needed, interface=self._interface))
        self._began = True
        return nodes

    def survey(self, folder: Path, *, write: bool = False) -> Survey:
        """The nodes that the job has now. Raises SlurmError outside of a job."""
        job = self._job
        try:
            row = one_of(self._calls.queue([job]))
        except SlurmError:
            row = None
        if row is not None and row.nodes:
            self._node_list = row.nodes
        return survey_nodes(
            self._node_list or self._environment["SLURM_JOB_NODELIST"],
            self._calls,
            folder=folder,
            python=self.agent_python(Node(name="", address="")),
            transport=lambda name: self.transport(Node(name=name, address="")),
            interface=self._interface,
            gpus=gpus_promised(self._cluster),
            write=write,
        )

    def as_nodes(self, reports: Mapping[str, Report]) -> Sequence[Node]:
        """The nodes of some reports."""
        return self._placed(as_nodes(reports, self._interface))

    def _placed(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes with the switches that the profile, or SLURM, says they hang on."""
        if self._switches is None:
            self._switches = profile_switches(self._cluster) or self._calls.switches()
        return with_switches(nodes, self._switches)

    @property
    def _interface(self) -> str:
        return self._cluster.inter_node.interface if self._cluster.inter_node else ""

    def transport(self, node: Node) -> Transport:
        """One srun step for each command."""
        return SrunTransport(node.name, self._step_settings())

    def agent_python(self, node: Node) -> str:
        """The interpreter that runs this process, or the container's."""
        return python_of_ranks(self._cluster.backend.slurm, sys.executable)

    def allocation(self) -> str:
        """`slurm:JOB:RESTARTS` inside of a job, else an empty text."""
        if "SLURM_JOB_ID" not in self._environment:
            return ""
        return f"slurm:{self._job}:{self._environment.get('SLURM_RESTART_COUNT', '0')}"

    def is_over(self, allocation: str) -> bool:
        """Whether SLURM has ended it: an earlier start of this job, or another job that does not run."""
        kind, _, rest = allocation.partition(":")
        job, _, restarts = rest.partition(":")
        if kind != "slurm" or not job.isdigit() or not restarts.isdigit():
            return False
        if job == self._environment.get("SLURM_JOB_ID"):
            return int(restarts) < int(self._environment.get("SLURM_RESTART_COUNT", "0"))
        try:
            row = one_of(self._calls.queue([job]))
        except SlurmError:
            return False
        return row is None or row.ours != JobState.RUNNING or row.restarts > int(restarts)

    def taken_away(self, names: Sequence[str]) -> Sequence[str]:
        """Nodes that were down for Slurm leave the job (`--no-kill`) and do not come back to it."""
        held = self._calls.hostnames(self._node_list) if self._node_list else names
        return [name for name in names if name not in held]

    def orphan_command(self, run: RunDir) -> tuple[str, ...]:
        """What an agent runs when its supervisor is gone and its ranks have left."""
        if not self._config.requeue or self._config.container is not None:
            return ()
        return (sys.executable, "-m", "llmtrain.backends.slurm.end", "--orphan", str(run.path))

    def keep_watch(self, run: RunDir, names: Sequence[str]) -> None:
        """See to it that nodes of the job would notice the loss of this one, also while no agent runs."""
        command = [word.replace("--orphan", "--watch") for word in self.orphan_command(run)[:-1]]
        if not command:
            return
        if self._lookouts is None:
            way = partial(SrunTransport, settings=self._step_settings())
            self._lookouts = Lookouts([*command, str(run.path)], way, run.supervisor_log)
        here = self._environment.get("SLURMD_NODENAME", socket.gethostname())
        self._lookouts.keep([name for name in names if name != here])

    @property
    def _job(self) -> str:
        try:
            return self._environment["SLURM_JOB_ID"]
        except KeyError:
            raise SlurmError(
                "this is not inside of a SLURM job",
                hint="`llmtrain launch` submits one",
            ) from None

    def _step_settings(self) -> StepSettings:
        if self._binds is None:
            self._binds = self._calls.binds_tasks()
        storage = self._environment.get("LLMTRAIN_RUNS", self._cluster.storage.path)
        return step_settings(self._cluster, self._job, bind=self._binds, storage=storage)
