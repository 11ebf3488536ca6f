"""All ranks agree on the checkpoint to restore; they share the reading that its checksums need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.engine.checkpoint.pieces import Ranks
from llmtrain.errors import CheckpointError, LlmtrainError, Problem
from llmtrain.run.checkpoints import newest_valid, read_chain, verify_shards


def choose_checkpoint(
    root: Path, ranks: Ranks, *, run_id: str, rejected: Mapping[str, Sequence[Problem]] | None = None
) -> tuple[str, str]:
    """Return the name of the newest whole checkpoint, and why it is not the newest one ("" when it is).

    Called by all ranks together, with the same answer on all of them: rank 0 looks at manifests and sizes,
    then every rank reads its share of the shards. ("", "") when the run has never committed one. Raises
    CheckpointError on all ranks alike when it has, and none is whole. `rejected`: faults that were found in
    checkpoints when they were loaded, by name.
    """
    rejected = dict(rejected or {})
    while True:
        faults: list[Problem] = []
        chosen = ("", "")
        if ranks.rank == 0:
            try:
                selection = newest_valid(root, run_id=run_id, checksums=False, rejected=rejected)
                if selection.checkpoint is not None:
                    chosen = (selection.checkpoint.name, selection.reason)
            except LlmtrainError as error:
                faults = list(error.problems)
        told, (name, reason) = json.loads(ranks.exchange(json.dumps([_plain(faults), chosen]))[0])
        if told:
            failure = CheckpointError(told[0][1])
            failure.problems = tuple(Problem(*each) for each in told)
            raise failure
        if not name:
            return "", ""
        found = _faults_of(root / name, ranks)
        if not found:
            return name, reason
        rejected[name] = found


def _faults_of(checkpoint: Path, ranks: Ranks) -> list[Problem]:
    """Faults of a checkpoint's shards, as all ranks together see them."""
    try:
        shards = [(link.path, shard) for link in read_chain(checkpoint) for shard in link.manifest.shards]
        mine = [
            fault
            for path, shard in shards[ranks.rank :: ranks.world_size]
            for fault in verify_shards(path, [shard])
        ]
    except LlmtrainError as error:
        mine = list(error.problems)
    answers = ranks.exchange(json.dumps(_plain(mine)))
    return [Problem(*each) for answer in answers for each in json.loads(answer)]


def _plain(problems: Sequence[Problem]) -> list[tuple[str, str, str, bool]]:
    return [(each.where, each.message, each.hint, each.may_pass) for each in problems]
