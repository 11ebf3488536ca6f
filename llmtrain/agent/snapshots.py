"""A node's shared memory between attempts: what it holds, what must be saved from it, and its end. The
supervisor asks over the node's transport, while no rank runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from llmtrain.errors import LlmtrainError
from llmtrain.run import snapshots
from llmtrain.run.layout import RunDir


def answer(action: str, run: Path, node: str, *, name: str = "", shards: str = "") -> dict[str, Any]:
    """Do `list`, `rescue` or `drop`; what the supervisor reads, with `error` when it failed.

    `rescue` copies `shards` (comma-separated) of snapshot `name` to the run's folder.
    """
    folder = snapshots.snapshots_of(run, node)
    try:
        if action == "drop":
            snapshots.drop(folder)
        elif action == "rescue":
            numbers = [int(number) for number in shards.split(",")]
            snapshots.rescue(folder, name, numbers, RunDir(run).rescued(name))
        held = [dataclasses.asdict(one) for one in snapshots.held_here(folder)]
    except (OSError, ValueError, LlmtrainError) as error:
        return {"held": [], "error": str(error)}
    return {"held": held, "error": ""}


def answer_json(action: str, run: Path, node: str, *, name: str = "", shards: str = "") -> str:
    """`answer` as one line."""
    return json.dumps(answer(action, run, node, name=name, shards=shards))
