"""The ladder of a run, frozen in its folder: which layout runs when so many nodes are left.

`plan.json` holds the rungs that the node-loss budget allows, as they were shown before the launch; a person
who lets a run go on with fewer nodes adds rungs in `allowance.json`. Both are read strictly: a rung decides
what trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.codec import from_json, to_json
from llmtrain.config.layout import Layout
from llmtrain.errors import ConfigError, RunError
from llmtrain.run.atomic import write_json
from llmtrain.run.job_file import read_document
from llmtrain.run.layout import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRung:
    """What runs when `nodes` nodes are left."""

    nodes: int
    layout: Layout | None
    """None: nothing fits on so few nodes."""
    micro_batches: tuple[int, ...] = ()
    """Of each replica; uneven where dp does not divide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What `allowance.json` holds: a person's word that the run may go on below its node-loss budget."""

    schema: int = 1
    fewest_nodes: int
    """With fewer nodes the run stops."""
    ladder: tuple[FrozenRung, ...]
    """Rungs below those of the plan, down to `fewest_nodes`."""


def write_allowance(run: RunDir, allowance: Allowance) -> None:
    """Write `allowance.json` in one step. Raises OSError."""
    write_json(run.allowance_json, to_json(allowance))


def read_allowance(run: RunDir) -> Allowance | None:
    """What a person allowed; None when nobody did. Raises RunError for a damaged file."""
    if not run.allowance_json.exists():
        return None
    return read_document(run.allowance_json, Allowance)


def read_ladder(run: RunDir, global_batch: int) -> tuple[FrozenRung, ...]:
    """All rungs, most nodes first.

    Raises RunError, with the file, when one is missing, torn, or does not keep the global batch.
    """
    allowed = read_allowance(run)
    rungs = {rung.nodes: rung for rung in (allowed.ladder if allowed else ())}
    _check(run.allowance_json, rungs.values(), global_batch)
    planned = _read_plan(run.plan_json)
    _check(run.plan_json, planned, global_batch)
    rungs |= {rung.nodes: rung for rung in planned}
    return tuple(rungs[nodes] for nodes in sorted(rungs, reverse=True))


def _read_plan(path: Path) -> tuple[FrozenRung, ...]:
    try:
        document = json.loads(path.read_bytes())
        entries = document["ladder"]
        return tuple(_rung(entry, f"{path}: ladder[{index}]") for index, entry in enumerate(entries))
    except OSError as error:
        raise RunError(f"cannot be read: {(error.strerror or str(error)).lower()}", where=str(path)) from None
    except ConfigError as error:
        raise RunError(error.text(), where=str(path)) from None
    except (ValueError, TypeError, LookupError, RecursionError):
        message = "holds no ladder; it was torn, edited or written by another version"
        raise RunError(message, where=str(path)) from None


def _rung(entry: dict[str, Any], where: str) -> FrozenRung:
    wanted = {name: entry[name] for name in ("nodes", "layout", "micro_batches")}
    return from_json(FrozenRung, wanted, where=where)


def _check(path: Path, rungs: Iterable[FrozenRung], global_batch: int) -> None:
    for rung in rungs:
        if rung.layout is None:
            continue
        try:
            split = rung.layout.micro_batches(global_batch)
        except ValueError as error:
            raise RunError(f"rung for {rung.nodes} nodes: {error}", where=str(path)) from None
        if split != rung.micro_batches:
            message = f"rung for {rung.nodes} nodes splits the batch {rung.micro_batches}, not {split}"
            raise RunError(message, where=str(path))
