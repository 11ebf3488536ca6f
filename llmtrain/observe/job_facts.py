"""What views need to know of a run besides its events: the job, the plan's promise, the nodes lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import Any

from llmtrain.errors import RunError
from llmtrain.parallel_dims import AXES
from llmtrain.run.layout import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a view needs of `job.json`; read leniently, so that a run of a newer version can be looked at."""

    recipe: str = ""
    cluster: str = ""
    backend: str = ""
    steps: int | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    sequence: int | None = None
    created: float | None = None
    lost_nodes: tuple[str, ...] = ()
    """Distinct nodes lost so far, from record.json."""
    planned_step_seconds: float | None = None
    """What the plan predicted for its layout, from plan.json."""
    planned_memory_bytes: float | None = None
    """Peak that the plan predicted for the fullest rank."""
    memory_capacity_bytes: float | None = None
    """Memory of one accelerator."""
    gpus_per_node: int | None = None
    nodes_lost_allowed: int | None = None
    """More lost nodes end the run."""

    @property
    def world_size(self) -> int | None:
        """Ranks of the planned layout; None when the job file does not tell."""
        degrees = [self.layout.get(axis) for axis in AXES]
        return prod(degree for degree in degrees if isinstance(degree, int)) if any(degrees) else None


def read_job_facts(run: RunDir) -> JobFacts:
    """What views need of `job.json`. Raises RunError when it cannot be read at all."""
    try:
        raw = json.loads(run.job_json.read_text(encoding="utf-8"))
        created = run.job_json.stat().st_mtime
    except (OSError, ValueError) as error:
        raise RunError(f"job.json cannot be read: {error}", where=str(run.job_json)) from error
    recipe, cluster = _at(raw, "spec", "recipe"), _at(raw, "spec", "cluster")
    predicted, record = _predicted(run), _read_object(run.record_json)
    at_launch = len(_names(_at(record, "nodes"))) or _at(cluster, "nodes")
    return JobFacts(
        recipe=_typed(_at(recipe, "name"), str) or "",
        cluster=_typed(_at(cluster, "name"), str) or "",
        backend=_typed(_at(cluster, "backend", "kind"), str) or "",
        steps=_typed(_at(recipe, "train", "steps"), int),
        layout=_typed(_at(raw, "layout"), dict) or {},
        global_batch=_typed(_at(recipe, "batch", "global"), int),
        sequence=_typed(_at(recipe, "model", "sequence"), int),
        created=created,
        lost_nodes=_names(_at(record, "lost_nodes")),
        planned_step_seconds=_number(_at(predicted, "step_seconds")),
        planned_memory_bytes=_number(_at(predicted, "memory_bytes", "total")),
        memory_capacity_bytes=_number(_at(predicted, "memory_bytes", "capacity")),
        gpus_per_node=_typed(_at(cluster, "gpus_per_node"), int),
        nodes_lost_allowed=_nodes_lost_allowed(at_launch, _at(recipe, "faults", "node_loss_budget")),
    )


def _names(listed: Any) -> tuple[str, ...]:
    return tuple(map(str, listed)) if isinstance(listed, list) else ()


def _predicted(run: RunDir) -> Any:
    """What the plan says of its best layout, which is the one that was launched."""
    plans = _at(_read_object(run.plan_json), "plans")
    return _at(plans[0], "predicted") if isinstance(plans, list) and plans else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _read_object(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _nodes_lost_allowed(nodes: Any, budget: Any) -> int | None:
    """The plan's rule: of the nodes at launch, ceil((1 - budget) x nodes) stay."""
    if type(nodes) is not int or not isinstance(budget, int | float):
        return None
    return nodes - ceil((1 - budget) * nodes - 1e-9)


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _typed(value: Any, kind: type) -> Any:
    return value if type(value) is kind else None


def read_ladder(run: RunDir) -> list[tuple[int, dict[str, Any], float | None]]:
    """Rungs of the plan: nodes left, layout (empty: nothing fits), predicted seconds a step."""
    rungs = _at(_read_object(run.plan_json), "ladder")
    found = []
    for rung in rungs if isinstance(rungs, list) else []:
        nodes, seconds = _at(rung, "nodes"), _at(rung, "predicted", "step_seconds")
        if type(nodes) is int:
            layout = _typed(_at(rung, "layout"), dict) or {}
            found.append((nodes, layout, float(seconds) if isinstance(seconds, int | float) else None))
    return found
