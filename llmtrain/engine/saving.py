"""Save and restore the training state of all ranks, through `engine/checkpoint`."""

from __future__ import annotations

from pathlib import Path

from llmtrain.engine.build import Parts
from llmtrain.engine.checkpoint.choose import choose_checkpoint
from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import Ranks
from llmtrain.engine.checkpoint.save import save_checkpoint
from llmtrain.engine.failures import RestoreError
from llmtrain.engine.state import Progress, checkpoint_info, progress_of, state_pieces
from llmtrain.errors import CheckpointError
from llmtrain.run.checkpoints import (
    Checkpoint,
    ever_committed,
    kept_for_ever,
    prune,
    read_manifest,
)


class CheckpointFolder:
    """The checkpoints of one run, as all ranks of one attempt see them."""

    def __init__(self, root: Path, run_id: str, parts: Parts, *, writer: str) -> None:
        """`writer` names the attempt, so that a stale one cannot take over a newer one's save."""
        self._root, self._run_id, self._parts, self._writer = root, run_id, parts, writer
        world = parts.groups.world
        device = parts.device.torch_device
        self._ranks = Ranks(world.index, world.size, lambda text: world.exchange(text, device))

    def save(self, progress: Progress) -> Checkpoint:
        """Save and commit the state, then delete what is older than the recipe keeps; raises
        CheckpointError on all ranks alike."""
        parts = self._parts
        committed = save_checkpoint(
            self._root,
            checkpoint_info(parts.recipe, self._run_id, parts.layout, progress),
            state_pieces(parts.buckets, parts.groups),
            self._ranks,
            writer=self._writer,
        )
        if self._ranks.rank == 0:
            kept = parts.recipe.checkpoint
            prune(self._root, kept.keep, protect=kept_for_ever(kept.keep_every_steps))
        return committed

    def bytes_of(self, checkpoint: Checkpoint) -> int:
        """Size of a committed checkpoint's shards."""
        return read_manifest(checkpoint.path).nbytes

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
        name, reason = self._choose(restore)
        parts = self._parts
        if not name:
            parts.buckets.initialise(parts.recipe.train.seed)
            return Progress(), None, reason
        manifest = read_manifest(self._root / name)
        progress = progress_of(manifest.info, parts.recipe, self._root / name)
        load_pieces(self._root / name, state_pieces(parts.buckets, parts.groups), manifest)
        parts.optimizer.set_step(progress.step)
        parts.buckets.publish()
        return progress, name, reason

    def _choose(self, restore: str) -> tuple[str, str]:
        """Name of the checkpoint to load, "" for none, and why; the same on all ranks.

        Model, seed and data cursor are compared when it is loaded. The recipe's digest is not: a longer
        training or a new version's new keys must not orphan a run's checkpoints.
        """
        if restore == "fresh":
            found = ever_committed(self._root) if self._ranks.rank == 0 else False
            if self._ranks.exchange(str(found))[0] == str(True):
                raise CheckpointError(
                    "the attempt is to start fresh, but the run has checkpoints", where=str(self._root)
                )
            return "", "first attempt"
        name, reason = choose_checkpoint(self._root, self._ranks, run_id=self._run_id)
        return name, reason if name else "the run has not committed a checkpoint yet"
