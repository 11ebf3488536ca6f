"""Rehearsals, one after another: each is a run of its own, in a folder of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.backends.registry import load_backend
from llmtrain.backends.slurm.login import is_elsewhere
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import JobSpec, resolve
from llmtrain.config.slurm import slurm_config
from llmtrain.errors import ConfigError, LlmtrainError, UsageError
from llmtrain.plan.make import make_plan
from llmtrain.run.record import RunRecord
from llmtrain.supervise.create import create_run, plan_as_files, run_dir_for
from llmtrain.supervise.nodes.membership import fewest_nodes
from llmtrain.supervise.rehearsal.acts import Sight
from llmtrain.supervise.rehearsal.scenarios import ONE_RANK, SCENARIOS, SMALL, Scenario
from llmtrain.supervise.rehearsal.stage import Stage

EVERYTHING = "all"
LIMIT_SECONDS = 420.0
"""For one scenario, without the time that its job waits in a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a scenario went; times in seconds from the failure, `recover_seconds` None where nothing had to."""

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
    if names == EVERYTHING:
        return SCENARIOS
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"there is no scenario `{name}`", hint=f"known: {', '.join(known)}, {EVERYTHING}"
            )
    return tuple(known[name] for name in wanted)


def rehearse(
    recipe: str,
    cluster: str,
    overrides: Sequence[str],
    scenarios: Sequence[Scenario],
    say: Callable[[str], None],
    *,
    leaves_out: bool = False,
) -> list[Outcome]:
    """Rehearse scenarios; what went wrong in one is its outcome. Those that cannot be rehearsed on the
    cluster are refused, before anything starts, or left out where that is wanted.

    Raises UsageError for such, ConfigError and InfeasibleError for what concerns all.
    """
    base = resolve(recipe, cluster, [*SMALL, *ONE_RANK, *overrides]).cluster
    refuse_elsewhere(base)
    why_not = {scenario.name: why for scenario in scenarios if (why := scenario.why_not(base))}
    if why_not and (not leaves_out or len(why_not) == len(scenarios)):
        raise UsageError(
            "; ".join(f"`{name}` cannot be rehearsed here: {why}" for name, why in why_not.items())
        )
    outcomes = []
    for scenario in scenarios:
        if scenario.name in why_not:
            say(f"{scenario.name}: left out: {why_not[scenario.name]}")
            outcomes.append(_left_out(scenario, why_not[scenario.name]))
            continue
        say(f"{scenario.name}: {scenario.does}")
        words = [*SMALL, *scenario.overrides, *scenario.places(base), *overrides]
        outcomes.append(_one(resolve(recipe, cluster, words), scenario, say))
    return outcomes


def refuse_elsewhere(cluster: ClusterProfile) -> None:
    """Raise UsageError for a profile whose runs lie on a login node that is another machine."""
    if is_elsewhere(cluster):
        login = slurm_config(cluster.backend.slurm).login
        raise UsageError(
            f"a rehearsal watches its runs closely, and those of this profile lie on {login}",
            hint=f"rehearse there: log in to {login} and type the same",
        )


def _one(spec: JobSpec, scenario: Scenario, say: Callable[[str], None]) -> Outcome:
    plan = make_plan(spec)
    run = run_dir_for(f"rehearsal-{scenario.name}", spec.cluster.storage.path, None)
    job, rendered = plan_as_files(run, spec, plan)
    backend = load_backend(spec.cluster)
    fewest = fewest_nodes(job, RunRecord(run_id=job.run_id, created=0.0), None)
    if problems := backend.check(spec, run, fewest=fewest):
        raise ConfigError(problems)
    create_run(run, rendered)
    stage = Stage(run, job, backend, limit=LIMIT_SECONDS, loses_nodes=scenario.is_of_nodes, say=say)
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


def _left_out(scenario: Scenario, why: str) -> Outcome:
    return Outcome(name=scenario.name, does=scenario.does, recovered=False, skipped=True, what=why)


def _outcome(scenario: Scenario, sight: Sight) -> Outcome:
    return Outcome(
        name=scenario.name,
        does=scenario.does,
        recovered=True,
        detect_seconds=max(0.0, sight.detected - sight.injected),
        recover_seconds=None if sight.recovered is None else max(0.0, sight.recovered - sight.injected),
        what=sight.what,
    )


def _forget(path: Path) -> None:
    """Remove the run of a rehearsal that went well; a file system may need a moment."""
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.2)
