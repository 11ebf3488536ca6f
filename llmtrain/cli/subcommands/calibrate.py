"""`llmtrain profiles calibrate`: measure the machine, or read finished runs, and store constants in a
profile.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain.cli import console
from llmtrain.cli.options import Json

if TYPE_CHECKING:
    from llmtrain.config.cluster import CalibrationConfig, ClusterProfile
    from llmtrain.plan.calibrate import MeasuredStep

_WARM_UP = 3
"""First steps of a run that do not count."""


def calibrate(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a shipped profile, or a path.")],
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="A run on this cluster whose steps count; repeatable."),
    ] = None,
    microbench: Annotated[
        bool, typer.Option(help="Measure this machine's rates first (part of a minute).")
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write the profile; default: PROFILE itself, or NAME.yaml here."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a profile's constants to what is measured.

    On this machine, and in finished runs; they are stored in the profile.
    """
    import datetime

    from llmtrain.cli.output import unwritable
    from llmtrain.config.load import load_profile
    from llmtrain.resources import find
    from llmtrain.run.atomic import write_atomic

    path = find("cluster_profiles", profile)
    today = datetime.date.today().isoformat()
    constants = _measured(load_profile(profile), runs or [], today, microbench=microbench)
    target = output or (path if profile == str(path) else Path(path.name))
    try:
        write_atomic(target, with_calibration(path.read_text(encoding="utf-8"), constants))
    except OSError as error:
        raise unwritable(target, error, option="--output") from error
    if as_json:
        console.emit_json({"schema": 1, "profile": str(target), "calibration": _values(constants)})
    else:
        console.emit(f"{target}:\n{calibration_section(constants)}")


def _measured(cluster: ClusterProfile, runs: list[str], date: str, *, microbench: bool) -> CalibrationConfig:
    """Constants of a profile, first from this machine's rates, then fitted to runs upon those."""
    evidence = []
    if microbench:
        cluster = replace(cluster, calibration=_from_this_machine(cluster, date))
        evidence.append(cluster.calibration.evidence)
    if runs:
        cluster = replace(cluster, calibration=_from_runs(cluster, runs, date))
        evidence.append(cluster.calibration.evidence)
    return replace(cluster.calibration, date=date, evidence="; ".join(evidence))


def _from_this_machine(cluster: ClusterProfile, date: str) -> CalibrationConfig:
    from llmtrain.cli.engine_program import answer_of
    from llmtrain.plan.calibrate import from_rates

    rates = answer_of("llmtrain.engine.microbench", task="the micro-benchmark")
    evidence = f"micro-benchmark on {rates.pop('device')} with torch {rates.pop('torch')}"
    return from_rates(cluster, rates, date=date, evidence=evidence)


def _from_runs(cluster: ClusterProfile, runs: list[str], date: str) -> CalibrationConfig:
    from llmtrain.plan.calibrate import calibrated, fit, predict
    from llmtrain.units import percent, plural

    steps = [measured_step(cluster, reference) for reference in runs]
    found = fit(steps)
    names = ", ".join(Path(reference).name for reference in runs)
    before = max(abs(predict(step) / step.seconds - 1) for step in steps)
    evidence = (
        f"{plural(len(steps), 'run')} ({names}), worst error {percent(found.worst)}, {percent(before)} before"
    )
    return calibrated(cluster, found, date=date, evidence=evidence)


def measured_step(cluster: ClusterProfile, reference: str) -> MeasuredStep:
    """A run's median step after the first ones; raises UsageError when it has too few."""
    from statistics import median

    from llmtrain.errors import UsageError
    from llmtrain.events.reader import read_events
    from llmtrain.events.schema import StepFinished
    from llmtrain.plan.calibrate import MeasuredStep
    from llmtrain.run.find import find_run
    from llmtrain.run.job_file import read_attempt_file, read_job_file

    run = find_run(reference, cluster.storage.path)
    job = read_job_file(run.job_json)
    for number in reversed(run.attempt_numbers()):
        attempt = run.attempt(number)
        payloads = (event.payload for event in read_events(attempt.rank_events(0)))
        seconds = [payload.seconds for payload in payloads if isinstance(payload, StepFinished)][_WARM_UP:]
        if len(seconds) >= _WARM_UP:
            layout = read_attempt_file(attempt.attempt_json).layout
            where = replace(job.spec.cluster, calibration=cluster.calibration)
            return MeasuredStep(recipe=job.spec.recipe, cluster=where, layout=layout, seconds=median(seconds))
    raise UsageError(f"no attempt of {run.run_id} has {2 * _WARM_UP} steps", where=str(run.path))


def calibration_section(constants: CalibrationConfig) -> str:
    """The YAML section of a profile."""
    lines = ["calibration:"]
    for name, value in _values(constants).items():
        if isinstance(value, str):
            lines.append(f"  {name}: {json.dumps(value)}")
        elif name in ("launch_gap", "step_overhead"):
            lines.append(f"  {name}: {value * 1e6:.4g}us")
        else:
            lines.append(f"  {name}: {value:.4g}")
    return "\n".join(lines) + "\n"


def _values(constants: CalibrationConfig) -> dict[str, Any]:
    pairs = ((item.name, getattr(constants, item.name)) for item in fields(constants))
    return {name: value for name, value in pairs if value is not None and value != ""}


def with_calibration(text: str, constants: CalibrationConfig) -> str:
    """A profile's text with its calibration section replaced, or added at the end."""
    kept, skipping = [], False
    for line in text.splitlines():
        if line.startswith("calibration:"):
            skipping = True
            continue
        if skipping and line and not line[0].isspace() and not line.startswith("#"):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept).rstrip() + "\n\n" + calibration_section(constants)
