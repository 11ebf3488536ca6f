"""The nodes of a run as its supervisor knows them: who was there at launch, is lost, or has come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llmtrain.backends.base import (
    AllocationBackend,
    Backend,
    Node,
    PreflightBackend,
    RehearsedBackend,
    ReturnBackend,
    WatchedBackend,
)
from llmtrain.config.layout import Layout
from llmtrain.errors import LlmtrainError
from llmtrain.plan.placement import ranks_on_nodes
from llmtrain.run.job_file import JobFile
from llmtrain.run.ladder_file import read_allowance, read_ladder
from llmtrain.run.layout import RunDir
from llmtrain.run.node_history import Verdict, recall, remember, suspects
from llmtrain.run.record import RunRecord
from llmtrain.supervise.decision.attempt_plan import AttemptPlan
from llmtrain.supervise.detection.limits import Limits
from llmtrain.supervise.nodes.fleet import sweep_nodes
from llmtrain.supervise.nodes.membership import (
    choose,
    due,
    fewest_nodes,
    reliable_first,
    with_losses,
    with_returned,
)

TAKEN_AWAY = "the scheduler took it out of the job for good; another start of the job may bring it back"
NOT_FIT = "it is not fit any more"


class Members:
    """Looks at nodes through the backend; what is known of them stands in the run's record."""

    def __init__(self, run: RunDir, job: JobFile, backend: Backend, limits: Limits) -> None:
        self._run_dir, self._job, self._backend, self._limits = run, job, backend, limits
        self._allowance = read_allowance(run)
        self.suspects: Mapping[str, str] = {}
        """Nodes with a recent conviction, which are used last, and which."""
        self._convicted: dict[str, str] = {}
        self.nodes: tuple[Node, ...] = ()
        """Nodes that could be reached when they were looked at last, in the order of their ranks."""

    @property
    def fewest_allowed(self) -> int | None:
        """Nodes that a person allows the run to go on with."""
        return None if self._allowance is None else self._allowance.fewest_nodes

    def enter(self, record: RunRecord) -> RunRecord:
        """Look at all nodes, when a supervisor begins. Those that join later count as nodes at launch, too.

        A run that had ended is gone on with by a person: then nodes that are fit again are taken up, and only
        those that are missing count as lost. Raises LlmtrainError when too few are fit.
        """
        record = self._enter_allocation(record)
        fewest = fewest_nodes(self._job, record, self._allowance)
        self._take(self._backend.nodes(self._job.spec, self._run_dir, fewest=fewest))
        names = tuple(node.name for node in self.nodes)
        record = replace(record, nodes=tuple(dict.fromkeys((*record.nodes, *names))))
        missing = [name for name in record.nodes if name not in names]
        if record.stage == "ended":
            still_lost = tuple(name for name in record.lost_nodes if name in missing)
            record = with_returned(replace(record, lost_nodes=still_lost), names)
        else:
            again = due(record, time.time(), self._limits.quarantine)
            record = with_returned(record, [name for name in again if name in names])
        new = [name for name in missing if name not in record.away]
        return with_losses(record, new, "not fit when the supervisor began", time.time())

    def look_again(self, record: RunRecord) -> RunRecord:
        """Look at the nodes before one more attempt, in bounded time. Raises LlmtrainError."""
        if isinstance(self._backend, AllocationBackend):
            record = self._ask_scheduler(record, self._backend)
        record = self._preflight(record)
        wanted = due(record, time.time(), self._limits.quarantine)
        if not wanted or self._has_enough(record):
            return record
        known = {node.name: node for node in self.nodes}
        if isinstance(self._backend, ReturnBackend):
            back = self._backend.look_at(
                wanted, self._job.spec, self._run_dir, seconds=self._limits.look_again
            )
            known |= {node.name: node for node in back}
            wanted = tuple(node.name for node in back)
        ordered = dict.fromkeys((*record.nodes, *known))
        self.nodes = reliable_first([known[name] for name in ordered if name in known], self._convicted)
        return with_returned(record, [name for name in wanted if name in known])

    def gain(self, record: RunRecord, rung: int, pays: Callable[[Layout], bool]) -> str:
        """What an attempt on all nodes that are fit now would gain over one on a rung; empty: nothing, or not
        enough for what `pays` says of its layout. Asks those whose quarantine is over, in bounded time, and
        changes nothing. Raises LlmtrainError."""
        wanted = due(record, time.time(), self._limits.quarantine)
        if not wanted or not rung:
            return ""
        back = self._fit_again(wanted)
        names = [node.name for node in back]
        known = {node.name: node for node in (*self.nodes, *back)}
        nodes = tuple(known[name] for name in dict.fromkeys((*record.nodes, *known)) if name in known)
        batch = self._job.spec.recipe.batch.global_size
        away = [name for name in record.away if name not in names]
        better = choose(self._job, read_ladder(self._run_dir, batch), nodes, away, number=0)
        if 0 < better.rung <= rung or not pays(better.layout):
            return ""
        where = f"the rung for {better.rung} nodes" if better.rung else "the planned layout"
        return f"back and fit: {', '.join(names)}; the run steps up to {where}"

    def _fit_again(self, wanted: Sequence[str]) -> Sequence[Node]:
        """Those of the nodes that are fit now."""
        if isinstance(self._backend, ReturnBackend):
            return self._backend.look_at(
                wanted, self._job.spec, self._run_dir, seconds=self._limits.look_again
            )
        if isinstance(self._backend, AllocationBackend):
            if len(self._backend.taken_away(wanted)) == len(wanted):
                return ()
            there = self._backend.nodes(self._job.spec, self._run_dir, fewest=1)
            return [node for node in there if node.name in wanted]
        return ()

    def plan(self, record: RunRecord, number: int) -> AttemptPlan:
        """The next attempt. Raises InfeasibleError when nothing fits, RunError for a damaged ladder."""
        batch = self._job.spec.recipe.batch.global_size
        rungs = () if self._has_enough(record) else read_ladder(self._run_dir, batch)
        return choose(self._job, rungs, self.nodes, record.away, number=number, suspects=self.suspects)

    def remember(self, before: RunRecord, after: RunRecord) -> None:
        """Let other runs know of nodes that this one has lost."""
        if self._is_rehearsed:
            return
        new = [loss for loss in after.losses if loss not in before.losses and loss.is_away]
        losses = [
            Verdict(node=loss.node, time=loss.since, verdict="lost", why=loss.why, by=self._run_dir.run_id)
            for loss in new
        ]
        remember(self._storage, losses)

    def convict(self, node: str, why: str) -> None:
        """A node is slow: it is used last from the next attempt on, and other runs learn of it."""
        word = Verdict(node=node, time=time.time(), verdict="slow", why=why, by=self._run_dir.run_id)
        if not self._is_rehearsed:
            remember(self._storage, [word])
        self._convicted[node] = f"slow: {why}"
        self._take(self.nodes)

    def sweep_returned(self, record: RunRecord, note: Callable[[str], None]) -> None:
        """End what is left of the run on lost nodes that are back, in bounded time: an agent that was cut off
        takes minutes to notice that nobody speaks to it any more."""
        newest = max((attempt.number for attempt in record.attempts), default=0)
        try:
            back = self._fit_again(record.away) if isinstance(self._backend, ReturnBackend) else ()
        except LlmtrainError as error:
            note(error.text())
            return
        swept, failed = sweep_nodes(self._run_dir, self._backend, back, older_than=newest + 1, grace=0.0)
        for name, word in {**swept, **failed}.items():
            note(f"{name}: {word}")

    def left(self, record: RunRecord) -> int:
        """How many nodes are left."""
        return len(self._left(record))

    @property
    def _is_rehearsed(self) -> bool:
        """Whether things go wrong on purpose: then no node is to blame, and other runs need not know."""
        is_played = isinstance(self._backend, RehearsedBackend) and self._backend.is_rehearsed
        return is_played or bool(self._job.spec.recipe.faults.inject)

    @property
    def _storage(self) -> Path:
        """Where verdicts on nodes are kept."""
        path = Path(self._job.spec.cluster.storage.path)
        return path if path.is_absolute() else self._run_dir.path.parent

    def _take(self, nodes: Sequence[Node]) -> None:
        """Nodes in the order of their ranks: those with a recent conviction come last."""
        gpus = {node.name: node.gpus for node in nodes}
        self.suspects = {**suspects(recall(self._storage), gpus, time.time()), **self._convicted}
        self.nodes = reliable_first(nodes, self.suspects)
        if isinstance(self._backend, WatchedBackend):
            self._backend.keep_watch(self._run_dir, [node.name for node in nodes])

    def _preflight(self, record: RunRecord) -> RunRecord:
        """Nodes that have become unfit since the last attempt are left out. What is wrong with all of them is
        no node's fault, and who does not answer in time is the attempt's to find out."""
        if not isinstance(self._backend, PreflightBackend):
            return record
        names = [node.name for node in self._left(record)]
        unfit = self._backend.preflight(names, self._run_dir, seconds=self._limits.look_again)
        if len(unfit) >= len(names):
            return record
        for name, why in unfit.items():
            record = with_losses(record, [name], why, time.time())
        return record

    def _left(self, record: RunRecord) -> list[Node]:
        return [node for node in self.nodes if node.name not in record.away]

    def _has_enough(self, record: RunRecord) -> bool:
        planned = ranks_on_nodes(self._job.layout, self._job.spec.cluster.gpus_per_node)
        return len(self._left(record)) >= len(planned)

    def _enter_allocation(self, record: RunRecord) -> RunRecord:
        """Nodes that were lost belong to the job that had them: a new one has nodes that its scheduler
        vouches for, perhaps the same after a repair."""
        if not isinstance(self._backend, AllocationBackend):
            return record
        allocation = self._backend.allocation()
        if allocation == record.allocation:
            return record
        fresh = replace(record, allocation=allocation, lost_nodes=(), nodes=())
        return with_returned(fresh, record.away)

    def _ask_scheduler(self, record: RunRecord, backend: AllocationBackend) -> RunRecord:
        """Nodes that the scheduler has taken away since the last attempt are lost."""
        nodes = tuple(self._backend.nodes(self._job.spec, self._run_dir))
        left = {node.name for node in nodes}
        gone = [node.name for node in self.nodes if node.name not in left | set(record.away)]
        self._take(nodes)
        taken = backend.taken_away(gone)
        record = with_losses(record, taken, TAKEN_AWAY, time.time())
        return with_losses(record, [name for name in gone if name not in taken], NOT_FIT, time.time())
