"""Save and restore the training state of all ranks, through `engine/checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from llmtrain.engine.build import Parts
from llmtrain.engine.checkpoint.load import load_pieces
from llmtrain.engine.checkpoint.pieces import Ranks
from llmtrain.engine.checkpoint.save import save_checkpoint
from llmtrain.engine.parallel.groups import Group
from llmtrain.engine.state import Progress, checkpoint_info, progress_of, recipe_digest, state_pieces
from llmtrain.errors import CheckpointError, LlmtrainError
from llmtrain.run.checkpoints import Checkpoint, ever_committed, newest_valid, prune, read_manifest


class CheckpointFolder:
    """The checkpoints of one run, as all ranks of one attempt see them."""

    def __init__(self, root: Path, run_id: str, parts: Parts, *, writer: str) -> None:
        """`writer` names the attempt, so that a stale one cannot take over a newer one's save."""
        self._root, self._run_id, self._parts, self._writer = root, run_id, parts, writer
        world = parts.groups.world
        device = parts.device.torch_device
        self._ranks = Ranks(world.index, world.size, lambda text: exchange(world, device, text))

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
            prune(self._root, parts.recipe.checkpoint.keep)
        return committed

    def bytes_of(self, checkpoint: Checkpoint) -> int:
        """Size of a committed checkpoint's shards."""
        return read_manifest(checkpoint.path).nbytes

    def restore(self, restore: str) -> tuple[Progress, str | None, str]:
        """Give all ranks their state: from the newest whole checkpoint, or from the seed when the run never
        had one. Return the progress, the checkpoint's name (None: from the seed), and the reason when it is
        not the newest.

        Raises CheckpointError on all ranks when there were checkpoints and none is whole, or `restore` is
        `fresh` though the run has some: a run never starts over by itself.
        """
        name, reason = self._choose(restore)
        parts = self._parts
        if not name:
            parts.buckets.initialise(parts.recipe.train.seed)
            return Progress(), None, reason
        manifest = read_manifest(self._root / name)
        progress = progress_of(manifest.info, parts.recipe)
        load_pieces(self._root / name, state_pieces(parts.buckets, parts.groups), manifest)
        parts.optimizer.set_step(progress.step)
        parts.buckets.publish()
        return progress, name, reason

    def _choose(self, restore: str) -> tuple[str, str]:
        """Rank 0 chooses, for a checkpoint that is damaged while others look must not part the ranks."""
        answer = ["", "", ""]
        if self._ranks.rank == 0:
            try:
                answer = ["", *self._look(restore)]
            except LlmtrainError as error:
                answer = [error.text(), "", ""]
        error_text, name, reason = json.loads(self._ranks.exchange(json.dumps(answer))[0])
        if error_text:
            raise CheckpointError(error_text)
        return name, reason

    def _look(self, restore: str) -> tuple[str, str]:
        if restore == "fresh":
            if ever_committed(self._root):
                raise CheckpointError(
                    "the attempt is to start fresh, but the run has checkpoints", where=str(self._root)
                )
            return "", "first attempt"
        digest = recipe_digest(self._parts.recipe)
        selection = newest_valid(self._root, run_id=self._run_id, recipe_digest=digest)
        if selection.checkpoint is None:
            return "", "the run has not committed a checkpoint yet"
        return selection.checkpoint.name, selection.reason


def exchange(world: Group, device: torch.device, text: str) -> Sequence[str]:
    """Gather one text from every rank, in rank order; a barrier."""
    if world.size == 1:
        return [text]
    content = text.encode()
    lengths = world.all_gather(torch.tensor([len(content)], device=device)).tolist()
    padded = content.ljust(max(lengths), b" ")
    row = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    rows = world.all_gather(row.unsqueeze(0)).cpu()
    return [bytes(rows[rank, : lengths[rank]].tolist()).decode() for rank in range(world.size)]
