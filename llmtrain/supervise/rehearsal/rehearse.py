"""Rehearsals, one after another: each is a run of its own, in a folder of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.backends.base import Backend
from llmtrain.backends.registry import load_backend
from llmtrain.config.job import resolve
from llmtrain.errors import ConfigError, LlmtrainError, UsageError
from llmtrain.plan.make import make_plan
from llmtrain.supervise.create import create_run, plan_as_files, run_dir_for
from llmtrain.supervise.rehearsal.acts import Sight
from llmtrain.supervise.rehearsal.scenarios import SCENARIOS, SMALL, Scenario
from llmtrain.supervise.rehearsal.stage import Stage

LIMIT_SECONDS = 420.0
"""For one scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a scenario went; times in seconds from the failure."""

    name: str
    does: str
    recovered: bool
    detect_seconds: float | None = None
    recover_seconds: float | None = None
    what: str = ""
    skipped: bool = False
    """Whether it cannot be rehearsed with this profile; `what` says why."""


def chosen(names: str) -> tuple[Scenario, ...]:
    """The scenarios of a comma-separated list, or of `all`. Raises UsageError."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    if names == "all":
        return SCENARIOS
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise UsageError(f"there is no scenario `{name}`", hint=f"known: {', '.join(known)}, all")
    return tuple(known[name] for name in wanted)


def rehearse(
    recipe: str,
    cluster: str,
    overrides: Sequence[str],
    scenarios: Sequence[Scenario],
    say: Callable[[str], None],
) -> list[Outcome]:
    """Rehearse scenarios; what went wrong in one is its outcome. Raises ConfigError for what concerns all."""
    outcomes = []
    for scenario in scenarios:
        say(f"{scenario.name}: {scenario.does}")
        outcomes.append(_one(recipe, cluster, overrides, scenario, say))
    return outcomes


def _one(
    recipe: str, cluster: str, overrides: Sequence[str], scenario: Scenario, say: Callable[[str], None]
) -> Outcome:
    spec = resolve(recipe, cluster, [*SMALL, *scenario.overrides, *overrides])
    why = _why_not(scenario, spec.cluster.backend.kind)
    if why:
        return Outcome(name=scenario.name, does=scenario.does, recovered=False, skipped=True, what=why)
    plan = make_plan(spec)
    run = run_dir_for(f"rehearsal-{scenario.name}", spec.cluster.storage.path, None)
    job, rendered = plan_as_files(run, spec, plan)
    backend: Backend | None = None if scenario.is_of_nodes else load_backend(spec.cluster)
    if backend is not None and (problems := backend.check(spec, run)):
        raise ConfigError(problems)
    create_run(run, rendered)
    stage = Stage(run, job, backend, LIMIT_SECONDS)
    try:
        stage.start()
        sight = scenario.act(stage)
    except LlmtrainError as error:
        say(f"{scenario.name}: {error}; see {run.path}")
        return Outcome(name=scenario.name, does=scenario.does, recovered=False, what=str(error))
    finally:
        stage.end()
    _forget(run.path)
    return _outcome(scenario, sight)


def _why_not(scenario: Scenario, kind: str) -> str:
    if scenario.is_of_nodes and kind != "local":
        return "nodes of a real cluster are not cut off by a rehearsal; --cluster local loses stand-ins"
    if scenario.needs_local and kind != "local":
        return "touches processes and files of the ranks: only with a local profile"
    return ""


def _outcome(scenario: Scenario, sight: Sight) -> Outcome:
    return Outcome(
        name=scenario.name,
        does=scenario.does,
        recovered=True,
        detect_seconds=max(0.0, sight.detected - sight.injected),
        recover_seconds=max(0.0, sight.recovered - sight.injected),
        what=sight.what,
    )


def _forget(path: Path) -> None:
    """Remove the run of a rehearsal that went well; a file system may need a moment."""
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.2)
