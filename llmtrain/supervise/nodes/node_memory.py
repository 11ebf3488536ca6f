"""Snapshots in the nodes' memory, as the supervisor sees them between two attempts: which one the next
attempt goes on from, what idle nodes must give for it, and their end."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from llmtrain.backends.base import Backend, Node
from llmtrain.errors import CheckpointError, RunError
from llmtrain.run.checkpoints import last_committed
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.run.snapshots import Held, newest_complete
from llmtrain.transport.parallel import in_parallel

ASK_SECONDS = 30.0
"""For a node to say what it holds."""
RESCUE_SECONDS = 600.0
"""For a node to copy what it holds to the shared file system."""


class NodeMemory:
    """The memory tier of one run."""

    def __init__(self, run: RunDir, job: JobFile, backend: Backend, *, created: float) -> None:
        """`created` is the run's: snapshots of one that had its folder before do not count."""
        self._run, self._backend, self._created = run, backend, created
        self.is_on = job.spec.recipe.checkpoint.memory.every_steps is not None

    def choose(self, used: Sequence[Node], idle: Sequence[Node], note: Callable[[str], None]) -> str:
        """Name of the snapshot that an attempt on the nodes `used` goes on from: the newest that is complete,
        also with the help of idle nodes, and newer than every checkpoint. Empty when there is none."""
        if not self.is_on:
            return ""
        shutil.rmtree(self._run.path / "rescued", ignore_errors=True)
        held = self._ask([*used, *idle], "list", ASK_SECONDS)
        on_disk = self._newest_on_disk()
        best = newest_complete(held)
        if best is None or best[1] <= on_disk:
            return ""
        if not self._complete(best[0], used, idle, held):
            note(f"step {best[1]} in the nodes' memory cannot be brought together")
            best = newest_complete({node.name: held[node.name] for node in used if node.name in held})
            if best is None or best[1] <= on_disk:
                return ""
        where = f"the newest checkpoint is of step {on_disk}" if on_disk else "there is no checkpoint"
        note(f"goes on from step {best[1]} in the nodes' memory; {where}")
        return best[0]

    def drop(self, nodes: Sequence[Node], *, reached: int) -> None:
        """Free the nodes' memory at the end of a run that has reached a step, unless the newest checkpoint is
        older: then a resume goes on from there. Who does not answer keeps it until then, or until the node
        starts anew."""
        if self.is_on and self._newest_on_disk() >= reached:
            self._ask(nodes, "drop", ASK_SECONDS)
            shutil.rmtree(self._run.path / "rescued", ignore_errors=True)

    def _newest_on_disk(self) -> int:
        try:
            last = last_committed(self._run.checkpoints)
        except CheckpointError:
            return 0
        return last.step if last else 0

    def _complete(
        self, name: str, used: Sequence[Node], idle: Sequence[Node], held: Mapping[str, Sequence[Held]]
    ) -> bool:
        """Let idle nodes give what no node of the attempt holds; whether all is there then."""
        ranks = next(one.ranks for all_held in held.values() for one in all_held if one.name == name)
        missing = set(range(ranks))
        for node in used:
            missing -= _shards(held, node, name)
        for node in idle:
            give = missing & _shards(held, node, name)
            if give:
                shards = ",".join(str(shard) for shard in sorted(give))
                given = self._ask([node], "rescue", RESCUE_SECONDS, "--name", name, "--shards", shards)
                missing -= give if given else set()
        return not missing

    def _ask(
        self, nodes: Sequence[Node], action: str, seconds: float, *more: str
    ) -> dict[str, tuple[Held, ...]]:
        """Node name -> what it holds after an action; without nodes that could not do it."""

        def ask(node: Node) -> tuple[Held, ...]:
            transport = self._backend.transport(node)
            python = self._backend.agent_python(node)
            argv = [python, "-m", "llmtrain.agent", "snapshots", "--run-dir", str(self._run.path)]
            options = ["--node-name", node.name, "--action", action, *more]
            try:
                done = transport.run([*argv, *options], timeout=seconds)
            finally:
                transport.close()
            return _read(done.stdout)

        answers, failed = in_parallel({node.name: partial(ask, node) for node in nodes}, seconds=None)
        for name, error in failed.items():
            sys.stderr.write(f"{name}: snapshots: {error.text()}\n")
        return {
            name: tuple(one for one in held if one.created == self._created) for name, held in answers.items()
        }


def _shards(held: Mapping[str, Sequence[Held]], node: Node, name: str) -> set[int]:
    return {shard for one in held.get(node.name, ()) if one.name == name for shard in one.shards}


def _read(answer: bytes) -> tuple[Held, ...]:
    """What a node says that it holds; raises RunError."""
    try:
        told = json.loads(answer)
        if told["error"]:
            raise RunError(str(told["error"]))
        return tuple(Held(**{**one, "shards": tuple(one["shards"])}) for one in told["held"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError("no answer that can be read") from error
