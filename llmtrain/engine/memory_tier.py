"""The tier in host memory, as one attempt uses it: where its snapshots lie, and who keeps copies of whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmtrain.engine.build import Parts
from llmtrain.engine.checkpoint.exchange import beside
from llmtrain.engine.checkpoint.memory import MemorySnapshots, NodeMemory
from llmtrain.engine.checkpoint.pieces import Piece, Ranks
from llmtrain.engine.checkpoint.recall import Place, Recall
from llmtrain.plan.memory.replicas import choose_replicas
from llmtrain.run.checkpoints import Manifest
from llmtrain.run.job_file import AttemptFile
from llmtrain.run.layout import RunDir
from llmtrain.run.snapshots import snapshots_of


class MemoryTier:
    """Snapshots of a run in the memory of an attempt's nodes."""

    def __init__(self, run: RunDir, attempt: AttemptFile, parts: Parts) -> None:
        rank = parts.groups.rank
        self._attempt, self._parts, self._run = attempt, parts, run
        self._nodes = attempt.ranks or (tuple(range(parts.groups.world.size)),)
        node = next(number for number, ranks in enumerate(self._nodes) if rank in ranks)
        self._is_leader = self._nodes[node][0] == rank
        self._folder = snapshots_of(run.path, attempt.nodes[node])
        self._to_restore = attempt.snapshot
        self.every: int | None = parts.recipe.checkpoint.memory.every_steps
        """Steps between two snapshots; None: the tier is off."""

    def take_snapshot_to_restore(self) -> str:
        """Name of the snapshot that the attempt is to begin with, once; empty: none."""
        name, self._to_restore = self._to_restore, ""
        return name

    def restore(
        self, name: str, pieces: Sequence[Piece], ranks: Ranks, check: Callable[[Manifest], None]
    ) -> Manifest:
        """Fill the pieces from a snapshot; raises CheckpointError on all ranks alike."""
        place = Place(
            folder=self._folder / name,
            rescued=self._run.rescued(name),
            nodes=self._nodes,
            run_created=self._attempt.run_created,
        )
        device = self._parts.device.torch_device
        return Recall(place, beside(ranks, "recall"), device).read(pieces, check)

    def snapshots(
        self, pieces: Sequence[Piece], ranks: Ranks, before_commit: Callable[[], object]
    ) -> MemorySnapshots | None:
        """Snapshots beside the training; None when the tier is off. To be called by all ranks together."""
        if self.every is None:
            return None
        copies = self._parts.recipe.checkpoint.memory.copies
        memory = NodeMemory(
            folder=self._folder,
            attempt=self._attempt.number,
            run_created=self._attempt.run_created,
            is_leader=self._is_leader,
            replicas=choose_replicas(self._parts.layout.dims, self._nodes, copies),
        )
        return MemorySnapshots(memory, pieces, beside(ranks, "snapshot"), before_commit)
