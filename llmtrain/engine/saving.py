"""Save and restore the training state of all ranks, through `engine/checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmtrain.engine.build import Parts
from llmtrain.engine.checkpoint.background import BackgroundSaves
from llmtrain.engine.checkpoint.choose import choose_checkpoint
from llmtrain.engine.checkpoint.exchange import beside
from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.memory import MemorySnapshots
from llmtrain.engine.checkpoint.pieces import Piece, Ranks
from llmtrain.engine.checkpoint.save import save_checkpoint
from llmtrain.engine.continuity import ContinuityError, check_probe, note_probe
from llmtrain.engine.failures import RestoreError
from llmtrain.engine.memory_tier import MemoryTier
from llmtrain.engine.numerics.state import fresh_state, saved_state
from llmtrain.engine.state import Progress, checkpoint_info, progress_of, state_pieces
from llmtrain.errors import CheckpointError, Problem
from llmtrain.run.checkpoints import (
    Checkpoint,
    CheckpointInfo,
    Manifest,
    ever_committed,
    kept_for_ever,
    prune,
    read_manifest,
)
from llmtrain.run.job_file import AttemptFile
from llmtrain.run.layout import RunDir

FROM_MEMORY = "from the nodes' memory"
"""Why a snapshot was restored: it is newer than all checkpoints."""


class CheckpointFolder:
    """The checkpoints of one run, as all ranks of one attempt see them."""

    def __init__(
        self,
        root: Path,
        run_id: str,
        parts: Parts,
        *,
        writer: str,
        memory: MemoryTier | None = None,
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """`writer` names the attempt, so that a stale one cannot take over a newer one's save. `memory` is
        the tier in host memory; None: there is none. `before_commit` is called on rank 0, in any thread,
        before a state counts: what the ledger says of its steps is to outlive it."""
        self.memory, self._before_commit = memory, before_commit
        self.restored_from_disk = False
        """Whether the state that was restored is on disk already."""
        self._root, self._run_id, self._parts, self._writer = root, run_id, parts, writer
        world = parts.groups.world
        device = parts.device.torch_device
        self._ranks = Ranks(world.index, world.size, lambda text: world.exchange(text, device))
        self._pieces: list[Piece] | None = None

    @property
    def pieces(self) -> list[Piece]:
        """What this rank holds of the state. Its tensors keep their places for the whole attempt."""
        if self._pieces is None:
            self._pieces = list(state_pieces(self._parts.buckets, self._parts.groups))
        return self._pieces

    def info(self, progress: Progress) -> CheckpointInfo:
        """What a checkpoint of the state says besides its tensors; to be asked by all ranks when they save.
        What gradient compression still owes is no part of it, so that no layout is bound to it: it is dropped
        now, and a run that goes on computes what a resumed one does."""
        self._parts.buckets.forget_errors()
        note_probe(self._parts, progress.extra)
        return checkpoint_info(self._parts.recipe, self._run_id, self._parts.layout, progress)

    def save(self, progress: Progress) -> Checkpoint:
        """Save and commit the state, then delete what is older than the recipe keeps, while all wait; raises
        CheckpointError on all ranks alike."""
        saved = save_checkpoint(
            self._root,
            self.info(progress),
            self.pieces,
            self._ranks,
            writer=self._writer,
            own=progress.own,
            before_commit=self._before_commit,
        )
        if self._ranks.rank == 0:
            self.prune()
        return saved.checkpoint

    def in_background(self) -> BackgroundSaves:
        """Saves beside the training; to be called by all ranks together."""
        config = self._parts.recipe.checkpoint
        return BackgroundSaves(
            self._root,
            self.pieces,
            beside(self._ranks, "save"),
            writer=self._writer,
            incremental=config.incremental if config.every else 0,  # only those by the clock may be
            before_commit=self._before_commit,
        )

    def in_memory(self) -> MemorySnapshots | None:
        """Snapshots in host memory; None when the tier is off. To be called by all ranks together."""
        if self.memory is None:
            return None
        return self.memory.snapshots(self.pieces, self._ranks, self._before_commit)

    def first_says(self, word: bool) -> bool:
        """What rank 0 says; to be asked by all ranks together."""
        return self._ranks.exchange(str(word))[0] == str(True)

    def prune(self) -> None:
        """Delete what is older than the recipe keeps; for one rank, after a commit. Raises
        CheckpointError."""
        kept = self._parts.recipe.checkpoint
        prune(self._root, kept.keep, protect=kept_for_ever(kept.keep_every_steps))

    def restore(self, restore: str) -> tuple[Progress, str | None, str]:
        """Give all ranks their state: from the newest whole checkpoint, or from the seed when the run never
        had one. Return the progress, the checkpoint's name (None: from the seed), and the reason when it is
        not the newest.

        Raises RestoreError on all ranks when there were checkpoints and none is whole or of this recipe, or
        `restore` is `fresh` though the run has some: a run never starts over by itself.
        """
        try:
            return self._restore(restore)
        except CheckpointError as error:
            raise RestoreError(error) from error

    def _restore(self, restore: str) -> tuple[Progress, str | None, str]:
        lost = ""
        snapshot = "" if self.memory is None else self.memory.take_snapshot_to_restore()
        if self.memory is not None and snapshot:
            try:
                manifest = self.memory.restore(snapshot, self.pieces, self._ranks, self._check)
                return self._go_on_from(manifest, Path(snapshot)), snapshot, FROM_MEMORY
            except CheckpointError as error:
                lost = f"; {error}"
        rejected: dict[str, Sequence[Problem]] = {}
        while True:
            try:
                return self._restore_from_disk(restore, rejected, lost)
            except ContinuityError as error:  # on all ranks alike
                name = Path(error.problems[0].where).name
                rejected[name] = error.problems

    def _restore_from_disk(
        self, restore: str, rejected: Mapping[str, Sequence[Problem]], lost: str
    ) -> tuple[Progress, str | None, str]:
        parts = self._parts
        name, reason = self._choose(restore, rejected)
        reason += lost
        if not name:
            parts.buckets.initialise(parts.recipe.train.seed)
            parts.guard.resume(fresh_state(parts.recipe), 0)
            return Progress(), None, reason
        manifest = read_manifest(self._root / name)
        progress_of(manifest, parts.recipe, parts.layout, self._ranks.rank, self._root / name)
        load_pieces(self._root / name, self.pieces, manifest)
        self.restored_from_disk = True
        return self._go_on_from(manifest, self._root / name), name, reason.removeprefix("; ")

    def _check(self, manifest: Manifest) -> None:
        """Raise CheckpointError when a state is not this run's."""
        parts = self._parts
        progress_of(manifest, parts.recipe, parts.layout, self._ranks.rank, self._root)

    def _go_on_from(self, manifest: Manifest, where: Path) -> Progress:
        """Everything but the pieces, once these are loaded."""
        parts = self._parts
        progress = progress_of(manifest, parts.recipe, parts.layout, self._ranks.rank, where)
        parts.buckets.publish()
        state = saved_state(parts.recipe, progress.extra, progress.step, str(where))
        parts.guard.resume(state, progress.step)
        check_probe(parts, progress.extra, str(where))
        return progress

    def _choose(self, restore: str, rejected: Mapping[str, Sequence[Problem]]) -> tuple[str, str]:
        """Name of the checkpoint to load, "" for none, and why; the same on all ranks.

        Model, seed and data cursor are compared when it is loaded. The recipe's digest is not: a longer
        training or a new version's new keys must not orphan a run's checkpoints.
        """
        if restore == "fresh":
            if self.first_says(self._ranks.rank == 0 and ever_committed(self._root)):
                raise CheckpointError(
                    "the attempt is to start fresh, but the run has checkpoints", where=str(self._root)
                )
            return "", "first attempt"
        name, reason = choose_checkpoint(self._root, self._ranks, run_id=self._run_id, rejected=rejected)
        return name, reason if name else "the run has not committed a checkpoint yet"


def checkpoints_of(
    run: RunDir, run_id: str, attempt: AttemptFile, parts: Parts, before_commit: Callable[[], object]
) -> CheckpointFolder:
    """A run's checkpoints and its tier in host memory, as an attempt sees them."""
    return CheckpointFolder(
        run.checkpoints,
        run_id,
        parts,
        writer=f"attempt {attempt.number}",
        memory=MemoryTier(run, attempt, parts),
        before_commit=before_commit,
    )
