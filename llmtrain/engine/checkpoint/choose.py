"""All ranks agree on the checkpoint to restore; they share the reading that its checksums need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llmtrain.engine.checkpoint.pieces import Ranks
from llmtrain.errors import CheckpointError, LlmtrainError, Problem
from llmtrain.run.checkpoints import newest_valid, read_manifest, verify_shards


def choose_checkpoint(root: Path, ranks: Ranks, *, run_id: str) -> tuple[str, str]:
    """Return the name of the newest whole checkpoint, and why it is not the newest one ("" when it is).

    Called by all ranks together, with the same answer on all of them: rank 0 looks at manifests and sizes,
    then every rank reads its share of the shards. ("", "") when the run has never committed one. Raises
    CheckpointError on all ranks alike when it has, and none is whole.
    """
    rejected: dict[str, Sequence[Problem]] = {}
    while True:
        answer = ["", "", ""]
        if ranks.rank == 0:
            try:
                selection = newest_valid(root, run_id=run_id, checksums=False, rejected=rejected)
                if selection.checkpoint is not None:
                    answer = ["", selection.checkpoint.name, selection.reason]
            except LlmtrainError as error:
                answer = [error.text(), "", ""]
        fault, name, reason = json.loads(ranks.exchange(json.dumps(answer))[0])
        if fault:
            raise CheckpointError(fault)
        if not name:
            return "", ""
        found = _faults_of(root / name, ranks)
        if not found:
            return name, reason
        rejected[name] = found


def _faults_of(checkpoint: Path, ranks: Ranks) -> list[Problem]:
    """Faults of a checkpoint's shards, as all ranks together see them."""
    try:
        shards = read_manifest(checkpoint).shards[ranks.rank :: ranks.world_size]
        mine = verify_shards(checkpoint, shards)
    except LlmtrainError as error:
        mine = list(error.problems)
    answers = ranks.exchange(json.dumps([[problem.where, problem.message] for problem in mine]))
    return [Problem(where, message) for answer in answers for where, message in json.loads(answer)]
