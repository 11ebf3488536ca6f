"""Snapshots in shared memory: every few steps, beside the training, with copies on other nodes.

A rank writes its shard into its node's folder and sends copies to other nodes' ranks; when all have done so,
every node renames its folder, and when all have done that, the snapshots before go. So each node always holds
its part of one that is complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.engine.checkpoint.aside import Aside
from llmtrain.engine.checkpoint.copies import Incoming, Outgoing, exchange_files
from llmtrain.engine.checkpoint.pieces import Piece, Ranks
from llmtrain.engine.checkpoint.save import owned_pieces, save_shard, try_together
from llmtrain.errors import CheckpointError
from llmtrain.plan.memory.replicas import Replicas
from llmtrain.run.atomic import write_atomic
from llmtrain.run.checkpoints import CheckpointInfo, Manifest
from llmtrain.run.checkpoints.folder import LEFTOVER
from llmtrain.run.checkpoints.manifest import MANIFEST, encode_manifest, shard_name, sidecar_name
from llmtrain.run.snapshots import CREATED, RANKS, drop, drop_strangers, make_private, snapshot_name

Told = Callable[[CheckpointError | None, float, float], None]
"""Called in the thread when a snapshot has ended: what went wrong, its seconds, and how many of them training
waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """A rank's share in its node's folder of snapshots."""

    folder: Path
    attempt: int
    run_created: float
    """Tells the run's snapshots from those of one that had its folder before."""
    is_leader: bool
    """Whether this rank makes, renames and removes folders for its node."""
    replicas: Replicas


class MemorySnapshots:
    """Snapshots of one attempt, one after the other. All ranks must start the same ones in the same order."""

    def __init__(
        self,
        memory: NodeMemory,
        pieces: Sequence[Piece],
        ranks: Ranks,
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """To be called on all ranks together: copies have a process group of their own, which moves them
        over the hosts' network and not between the accelerators. `before_commit`: as for checkpoints."""
        self._memory, self._ranks, self._before_commit = memory, ranks, before_commit
        has_copies = memory.replicas.losable_nodes > 0
        self._group = dist.new_group(backend="gloo") if has_copies else None
        self._aside: Aside[None] = Aside("snapshot", owned_pieces(pieces), copies=1)
        self._count = 0
        self._what = ""

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is under way."""
        return self._aside.is_busy

    def start(self, info: CheckpointInfo, told: Told, *, own: Mapping[str, Any]) -> None:
        """Let the thread take a snapshot of the state as it is now; `finish_copy` must be called before it
        changes."""
        called = time.perf_counter()
        self._aside.wait()
        waited = time.perf_counter() - called
        self._count += 1
        number = self._count

        def take(pieces: Iterable[Piece]) -> None:
            self._ranks.begin(number)
            fault = None
            try:
                self._take(info, pieces, own)
            except CheckpointError as error:
                fault = error
            told(fault, time.perf_counter() - called, waited + self._aside.stall)

        self._aside.start(0, take)

    def finish_copy(self) -> None:
        """Wait until the state may change."""
        self._aside.finish_copy()

    def wait(self) -> None:
        """Wait for the snapshot under way."""
        self._aside.wait()

    def forget(self) -> None:
        """Drop what is held: the training goes back to before it. To be called on all ranks, and none under
        way."""
        if self._memory.is_leader:
            drop(self._memory.folder)

    # ---- in the thread
    def _take(self, info: CheckpointInfo, pieces: Iterable[Piece], own: Mapping[str, Any]) -> None:
        memory, rank = self._memory, self._ranks.rank
        final = memory.folder / snapshot_name(info.step, memory.attempt)
        temporary = final.with_name(final.name + LEFTOVER)

        def begin() -> None:
            if rank == 0:
                self._before_commit()
            if memory.is_leader:
                _begin(memory, temporary, info, self._ranks.world_size)

        self._what = f"the snapshot of step {info.step}"
        try:
            self._together(begin)
            self._together(lambda: save_shard(temporary, rank, pieces, own))
            if self._group is not None:
                self._copy(temporary)
            self._together(lambda: temporary.rename(final) if memory.is_leader else None)
        except CheckpointError:
            if memory.is_leader:  # shared memory is scarce, and others need it
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._together(lambda: drop(memory.folder, keep=final.name) if memory.is_leader else None)

    def _copy(self, folder: Path) -> None:
        """Send this rank's shard to the nodes that keep copies of it, and take in what others send."""
        rank, replicas = self._ranks.rank, self._memory.replicas

        def measure() -> str:
            files = [folder / shard_name(rank), folder / sidecar_name(rank)]
            return ",".join(str(file.stat().st_size) for file in files)

        told = try_together(self._ranks, self._what, measure)
        outgoing, incoming = [], []
        for name in (shard_name, sidecar_name):
            outgoing += [Outgoing(folder / name(rank), target) for target in replicas.targets[rank]]
        for source in replicas.sources(rank):
            sizes = [int(size) for size in told[source].split(",")]
            for name, size in zip((shard_name, sidecar_name), sizes, strict=True):
                incoming.append(Incoming(folder / name(source), source, size))
        cpu = torch.device("cpu")
        self._together(lambda: exchange_files(outgoing, incoming, self._group, cpu))

    def _together(self, work: Callable[[], object]) -> None:
        def quietly() -> str:
            work()
            return ""

        try_together(self._ranks, self._what, quietly)


def _begin(memory: NodeMemory, temporary: Path, info: CheckpointInfo, ranks: int) -> None:
    """Make the node's folder for a new snapshot."""
    make_private(memory.folder)
    drop_strangers(memory.folder, memory.run_created)
    for leftover in memory.folder.glob(f"*{LEFTOVER}"):
        shutil.rmtree(leftover)
    temporary.mkdir()
    counted = replace(info, extra={**info.extra, RANKS: ranks, CREATED: memory.run_created})
    write_atomic(temporary / MANIFEST, encode_manifest(Manifest(info=counted, shards=(), tensors={})))
