"""The batch script of a SLURM job: `#SBATCH` lines, each with its reason, and what runs the supervisor.

sbatch reads the directives itself, with rules of its own: quotes of both kinds, a backslash escapes in every
place, `#` starts a comment outside quotes, and nothing is expanded but `%` in file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.reading.nodes import printable
from llmtrain.config.rules.slurm import CONTROL
from llmtrain.config.slurm import SlurmConfig, slurm_config
from llmtrain.errors import ConfigError, Problem
from llmtrain.render.environment import Plain, environment
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir

BATCH_SCRIPT = "slurm.sh"
SHORT_SECONDS = 900.0
"""Time limit of an allocation in which nodes are looked at; the shorter, the sooner it starts."""
SUPERVISOR_STARTS = 4
"""How often the batch script starts a supervisor that was killed, within one job."""

_BARE = re.compile(r"[A-Za-z0-9_./:,@%+=\[\]*|&!~^-]+\Z")


@dataclass(frozen=True, slots=True)
class Directive:
    """One `#SBATCH` line."""

    why: str
    name: str
    value: str | None = None
    """None: a bare flag."""

    @property
    def argument(self) -> Plain:
        """`--name="value"` as sbatch reads it."""
        return Plain(f"--{self.name}" if self.value is None else f"--{self.name}={sbatch_word(self.value)}")


def sbatch_word(value: str) -> str:
    """One word on an `#SBATCH` line; raises ConfigError for a text that no such line can carry."""
    if CONTROL.search(value):
        shown = printable(value)
        message = (
            f"`{shown}` holds a line break or another control character, which no #SBATCH line can carry"
        )
        raise ConfigError([Problem("backend.slurm", message)])
    if _BARE.match(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def render_slurm(job: JobFile, run: RunDir, *, python: str) -> str:
    """Text of `scripts/slurm.sh`. `python` has llmtrain on the host that runs the batch step."""
    cluster = job.spec.cluster
    config = slurm_config(cluster.backend.slurm)
    if config.container is not None and set(",:") & set(str(run.path.parent)):
        message = f"{run.path.parent} cannot be mounted into a container: it holds a colon or a comma"
        raise ConfigError([Problem("--run-dir", message, "name a folder without them")])
    text: str = (
        environment()
        .get_template("slurm.sh.j2")
        .render(
            directives=tuple(directives(job, run)),
            run_id=job.run_id,
            run_dir=str(run.path),
            runs=str(run.path.parent),
            log=str(run.supervisor_log),
            python=python,
            signal=Plain(config.signal),
            modules=config.modules,
            setup=tuple(Plain(line) for line in config.setup),
            starts=SUPERVISOR_STARTS,
        )
    )
    return text


def nodes_wanted(job: JobFile) -> int:
    """Nodes that a job asks for: those of the layout and the spares, at most those of the profile."""
    cluster = job.spec.cluster
    needed = -(-job.layout.world_size // cluster.gpus_per_node)
    return min(cluster.nodes, needed + cluster.spares)


def directives(job: JobFile, run: RunDir) -> Iterator[Directive]:
    """All directives of a job, in the order of the script."""
    cluster = job.spec.cluster
    config = slurm_config(cluster.backend.slurm)
    yield Directive("What squeue shows.", "job-name", config.job_name or job.run_id)
    yield from _place(config)
    yield from _resources(job.spec.cluster, config, nodes_wanted(job))
    yield from _output(config, run)
    yield from _survival(config)
    yield from _chain(config)
    yield from _notices(config)
    yield Directive(*_export(config))
    for name, value in config.extra.items():
        yield Directive("From the cluster profile (backend.slurm.extra).", name, value or None)


def allocation_command(cluster: ClusterProfile, command: Sequence[str]) -> list[str]:
    """What runs a command of some minutes in an allocation like that of a run on all nodes of a profile."""
    config = replace(slurm_config(cluster.backend.slurm), time=SHORT_SECONDS)
    wanted = [*_place(config), *_resources(cluster, config, cluster.nodes)]
    options = [f"--{each.name}" if each.value is None else f"--{each.name}={each.value}" for each in wanted]
    extra = [f"--{name}={value}" if value else f"--{name}" for name, value in config.extra.items()]
    return ["salloc", *options, *extra, *command]


def _place(config: SlurmConfig) -> Iterator[Directive]:
    for name, value, why in (
        ("partition", config.partition, "Where the nodes are taken from."),
        ("account", config.account, "Who is charged."),
        ("qos", config.qos, "Quality of service: limits and priority."),
        ("reservation", config.reservation, "Nodes that are kept for this job."),
        ("constraint", config.constraint, "Features that every node must have."),
        ("nodelist", config.nodelist, "Nodes that must be part of the job."),
        ("exclude", config.exclude, "Nodes that must not be part of the job."),
        ("switches", config.switches, "Nodes close to each other, and how long to wait for them."),
    ):
        if value:
            yield Directive(why, name, value)
    if config.time is not None:
        yield Directive("Time limit.", "time", time_limit(config.time))


def _resources(cluster: ClusterProfile, config: SlurmConfig, nodes: int) -> Iterator[Directive]:
    yield Directive("Nodes of the layout, and spares.", "nodes", str(nodes))
    yield Directive("One agent a node; it starts the node's ranks by torchrun.", "ntasks-per-node", "1")
    if config.exclusive:
        yield Directive("No other job on these nodes: ranks run at full speed.", "exclusive")
    if config.gres and config.gres != "none":
        yield Directive("Accelerators of each node.", "gres", config.gres)
    elif not config.gres and cluster.accelerator != "cpu":
        yield Directive("Accelerators of each node.", "gpus-per-node", str(cluster.gpus_per_node))
    if config.cpus_per_task is not None:
        yield Directive("CPUs of each node.", "cpus-per-task", str(config.cpus_per_task))
    why = "All memory of each node." if config.mem == "0" else "Memory of each node."
    if config.mem:
        yield Directive(why, "mem", config.mem)
    if config.hint:
        yield Directive("How hardware threads are used.", "hint", config.hint)
    if config.wait_all_nodes:
        yield Directive("Start when all nodes have booted.", "wait-all-nodes", "1")


def _output(config: SlurmConfig, run: RunDir) -> Iterator[Directive]:
    number = "%A_%a" if config.chain == "array" else "%j"
    yield Directive(
        "What this script and SLURM itself have to say; the supervisor has its own log.",
        "output",
        f"{_verbatim_path(run)}/slurm-{number}.log",
    )
    yield Directive("A job that is started again goes on in the same file.", "open-mode", "append")
    yield Directive("Where the supervisor starts.", "chdir", str(run.path))


def _verbatim_path(run: RunDir) -> str:
    """The run's folder in a file name pattern of SLURM; a backslash would switch off all patterns."""
    text = str(run.path)
    if "\\" in text or CONTROL.search(text):
        what = "a backslash" if "\\" in text else "a line break or another control character"
        message = f"`{printable(text)}` holds {what}, which SLURM's file names cannot carry"
        raise ConfigError([Problem("--run-dir", message, "name a folder without it")])
    return text.replace("%", "%%")


def _survival(config: SlurmConfig) -> Iterator[Directive]:
    yield Directive("A lost node does not end the job: the supervisor goes on with the others.", "no-kill")
    yield Directive(
        "Early warning, to this shell only: ranks save and leave before the time is over.",
        "signal",
        f"B:{config.signal}@{config.signal_seconds}",
    )
    if config.requeue:
        yield Directive("The job may be queued again and then goes on with the same run.", "requeue")
    else:
        yield Directive("The job is never queued again.", "no-requeue")


def _chain(config: SlurmConfig) -> Iterator[Directive]:
    dependencies = [config.dependency] if config.dependency else []
    if config.chain == "singleton":
        dependencies.append("singleton")
    if dependencies:
        why = "One job of this name at a time." if config.chain == "singleton" else "Jobs to wait for."
        yield Directive(why, "dependency", ",".join(dependencies))
    if config.chain == "array":
        yield Directive("Jobs of the same run, one at a time.", "array", f"1-{config.chain_length}%1")


def _notices(config: SlurmConfig) -> Iterator[Directive]:
    for name, value, why in (
        ("mail-type", config.mail_type, "Events that send mail."),
        ("mail-user", config.mail_user, "Who gets it."),
        ("comment", config.comment, "Kept by accounting."),
        ("wckey", config.wckey, "Kept by accounting."),
    ):
        if value:
            yield Directive(why, name, value)


def _export(config: SlurmConfig) -> tuple[str, str, str]:
    """Always all of what sbatch is started with: any other value makes SLURM run a login shell on the node
    first, and hold the job when that takes long."""
    why = "The environment of the shell that submits."
    if config.export == "none":
        why = "The environment of sbatch, which llmtrain starts with a few variables only."
    return why, "export", "ALL"


def time_limit(seconds: float) -> str:
    """`D-HH:MM:SS`, rounded up to whole seconds."""
    whole = -int(-seconds // 1)
    days, rest = divmod(whole, 86400)
    return f"{days}-{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
