"""What must hold inside the `slurm` section of a cluster profile."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.hosts import expand_entry
from llmtrain.config.reading.nodes import printable
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.config.slurm import SlurmConfig, slurm_config
from llmtrain.errors import Problem

PLACE = "backend.slurm"

OWN_DIRECTIVES: dict[str, str] = {
    "array": f"{PLACE}.chain: array",
    "begin": "",
    "chdir": "",
    "error": "",
    "gpus-per-node": f"{PLACE}.gres",
    "input": "",
    "no-kill": "",
    "no-requeue": f"{PLACE}.requeue: false",
    "nodes": "nodes",
    "ntasks": "",
    "ntasks-per-node": "",
    "open-mode": "",
    "output": "",
    "parsable": "",
    "quiet": "",
    "test-only": "",
    "wait": "",
    "wrap": "",
} | {
    name.replace("_", "-"): f"{PLACE}.{name}"
    for name in (
        "partition", "account", "qos", "reservation", "time", "constraint", "nodelist", "exclude", "switches",
        "exclusive", "gres", "cpus_per_task", "mem", "hint", "wait_all_nodes", "job_name", "comment", "wckey",
        "mail_type", "mail_user", "signal", "requeue", "dependency", "export",
    )
}  # fmt: skip
"""Directives that are not free -> what to write instead; empty: llmtrain decides."""

OWN_SRUN_ARGUMENTS = (
    *("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node", "-w", "--nodelist", "--jobid", "--overlap"),
    *("-i", "--input", "-o", "--output", "-e", "--error", "-l", "--label", "--pty", "-u", "--unbuffered"),
    *("-W", "--wait"),
)
"""Arguments of srun that the agents' channels depend on."""

_DIRECTIVE = re.compile(r"[a-z][a-z0-9-]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
"""What sbatch, which reads its directives line by line, cannot be told."""
_MOUNT = re.compile(r"/[^:]*:/[^:]*(:[^:]+)?")


@rule("backend")
def _section_needs_the_backend(profile: ClusterProfile) -> Iterator[Problem]:
    if profile.backend.slurm is not None and profile.backend.kind != "slurm":
        yield Problem(
            PLACE,
            f"backend.slurm means nothing with backend.kind = {profile.backend.kind}",
            "write `kind: slurm`, or remove the section",
        )


@rule("backend")
def _warning_fits_the_limit(profile: ClusterProfile) -> Iterator[Problem]:
    config = slurm_config(profile.backend.slurm)
    if config.time is None:
        return
    if config.time < 60:
        yield Problem(
            f"{PLACE}.time",
            f"a time limit of {config.time:g} s is less than Slurm's shortest, a minute",
            "e.g. `time: 24:00:00`",
        )
    elif config.signal_seconds >= config.time:
        yield Problem(
            f"{PLACE}.signal_seconds",
            f"a warning {config.signal_seconds} s before the end does not fit into {config.time:g} s",
            "a longer time, or fewer signal_seconds",
        )


@rule("backend")
def _chain_is_whole(profile: ClusterProfile) -> Iterator[Problem]:
    config = slurm_config(profile.backend.slurm)
    if config.chain == "none" and config.chain_length > 1:
        yield Problem(
            f"{PLACE}.chain_length",
            f"chain_length = {config.chain_length} needs a kind of chain",
            "`chain: singleton`, or `chain: array`",
        )


@rule("backend")
def _extra_directives(profile: ClusterProfile) -> Iterator[Problem]:
    for name in slurm_config(profile.backend.slurm).extra:
        place = f"{PLACE}.extra.{name}"
        if not _DIRECTIVE.fullmatch(name):
            hint = "the long name without dashes in front, e.g. `licenses`"
            yield Problem(place, f"`{name}` is not the name of a directive", hint)
        elif name in OWN_DIRECTIVES:
            own = OWN_DIRECTIVES[name]
            hint = f"use `{own}`" if own else "remove it"
            yield Problem(place, f"`--{name}` is set by llmtrain", hint)


@rule("backend")
def _srun_arguments(profile: ClusterProfile) -> Iterator[Problem]:
    for index, argument in enumerate(slurm_config(profile.backend.slurm).srun_args):
        place, name = f"{PLACE}.srun_args.{index}", argument.partition("=")[0]
        if not name.startswith("-"):
            hint = "write option and value in one entry, e.g. `--mpi=none`"
            yield Problem(place, f"`{argument}` is not an option", hint)
        elif name in OWN_SRUN_ARGUMENTS:
            yield Problem(place, f"`{name}` is set by llmtrain for every agent", "remove it")


@rule("backend")
def _container(profile: ClusterProfile) -> Iterator[Problem]:
    container = slurm_config(profile.backend.slurm).container
    if container is None:
        return
    if not container.image:
        hint = "e.g. `/shared/llmtrain.sif`, or `nvcr.io#nvidia/pytorch:25.06-py3` with pyxis"
        yield Problem(f"{PLACE}.container.image", "the container has no image", hint)
    if set(",:") & set(profile.storage.path):
        message = f"`{profile.storage.path}` cannot be mounted into a container: it holds a colon or a comma"
        yield Problem("storage.path", message, "name a folder without them")
    for index, mount in enumerate(container.mounts):
        if not _MOUNT.fullmatch(mount) or "," in mount:
            place = f"{PLACE}.container.mounts.{index}"
            hint = "SOURCE:TARGET or SOURCE:TARGET:FLAGS, both absolute, without commas"
            yield Problem(place, f"`{mount}` is not a mount", hint)


@rule("backend.kind", "storage.path")
def _storage_fits_a_directive(profile: ClusterProfile) -> Iterator[Problem]:
    path = profile.storage.path
    if profile.backend.kind != "slurm":
        return
    if "\\" in path or CONTROL.search(path):
        what = "a backslash" if "\\" in path else "a line break or another control character"
        message = f"`{printable(path)}` holds {what}, which no #SBATCH line can carry"
        yield Problem("storage.path", message, "name a folder without it")


@rule("backend")
def _nothing_starts_with_a_dash(profile: ClusterProfile) -> Iterator[Problem]:
    """Values that a command would take for an option of its own."""
    config = slurm_config(profile.backend.slurm)
    for place, value in _words(config):
        if value.startswith("-"):
            yield Problem(f"{PLACE}.{place}", f"`{value}` starts with a dash", "write the bare name")


def _words(config: SlurmConfig) -> Iterator[tuple[str, str]]:
    for index, module in enumerate(config.modules):
        yield f"modules.{index}", module
    if config.container is not None:
        yield "container.image", config.container.image
        yield "container.python", config.container.python


@rule("backend")
def _login_node(profile: ClusterProfile) -> Iterator[Problem]:
    login = slurm_config(profile.backend.slurm).login
    if not login:
        return
    hosts, problems = expand_entry(login, f"{PLACE}.login")
    yield from problems
    if not problems and len(hosts) != 1:
        yield Problem(f"{PLACE}.login", f"`{login}` stands for {len(hosts)} hosts", "name one login node")
    if not profile.backend.python:
        message = "launching through a login node needs the interpreter there"
        yield Problem("backend.python", message, "e.g. `/shared/venv/bin/python`, which has llmtrain")


SLURM_RULES: tuple[Rule[ClusterProfile], ...] = (
    _section_needs_the_backend,
    _warning_fits_the_limit,
    _chain_is_whole,
    _extra_directives,
    _srun_arguments,
    _container,
    _storage_fits_a_directive,
    _nothing_starts_with_a_dash,
    _login_node,
)
