"""From a job to the files of its run directory. Pure: no clock, no environment, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtrain.config.codec import to_json
from llmtrain.config.slurm import python_of_ranks
from llmtrain.render.environment import environment
from llmtrain.render.slurm import BATCH_SCRIPT, render_slurm
from llmtrain.render.variables import settings
from llmtrain.run.atomic import json_text
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir


@dataclass(frozen=True, slots=True)
class RenderedJob:
    """The files that a launch writes into the run directory: path relative to it -> text."""

    files: Mapping[str, str]


def render(job: JobFile, plan: Mapping[str, Any], run: RunDir, *, python: str) -> RenderedJob:
    """Render every file of a run.

    `plan` is the document of `plan --json`; `run.path` must be absolute, as the nodes see it; `python` is the
    interpreter that has llmtrain there. Raises ConfigError for values that no shell script can carry.
    """
    return RenderedJob(
        files={
            "job.json": json_text(to_json(job)),
            "plan.json": json_text(plan),
            **render_scripts(job, run, python=python).files,
        }
    )


def render_scripts(job: JobFile, run: RunDir, *, python: str) -> RenderedJob:
    """The scripts alone; a resumed run renders them again, since its interpreter may have moved."""
    cluster = job.spec.cluster
    python = cluster.backend.python or python
    scripts = run.scripts.relative_to(run.path)
    env = _template("env.sh.j2").render(
        settings=settings(cluster),
        variables=cluster.environment.variables,
        pass_through=cluster.environment.pass_through,
    )
    node = _template("node.sh.j2").render(
        env_file=str(run.scripts / "env.sh"),
        python=python_of_ranks(cluster.backend.slurm, python),
        run_id=job.run_id,
        job_json=str(run.job_json),
    )
    files = {str(scripts / "env.sh"): env, str(scripts / "node.sh"): node}
    if cluster.backend.kind == "slurm":
        files[str(scripts / BATCH_SCRIPT)] = render_slurm(job, run, python=python)
    return RenderedJob(files=files)


def _template(name: str) -> Any:
    return environment().get_template(name)
