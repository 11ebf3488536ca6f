"""The `slurm` section of a cluster profile's backend: what `sbatch` is asked for, and what the nodes need.

Fields that are sbatch directives have the directive's name, with `_` for `-`; an empty text leaves the
directive out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from llmtrain.config.fields import Bounds, Duration, NaturalInt, Pattern, PositiveInt, Verbatim

Line = Annotated[str, Pattern(r"[^\x00-\x1f\x7f\x85\u2028\u2029]{0,2000}", "one line"), Verbatim()]
"""Text without line breaks and other control characters: sbatch reads its directives line by line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """The container that agents and ranks run in; the supervisor runs outside of it."""

    kind: Literal["pyxis", "apptainer"]
    """`pyxis`: srun's plugin for enroot; `apptainer`: also Singularity's successor of that name."""
    image: Line
    """What `--container-image` or `apptainer exec` takes."""
    mounts: tuple[Line, ...] = ()
    """`SOURCE:TARGET[:FLAGS]`; the folder of run directories is mounted without being named."""
    python: Line = "python3"
    """The interpreter inside the image that has llmtrain."""
    mount_home: bool = False
    """Whether the home directory is mounted; what lies there (`~/.local`) then hides what the image holds."""
    arguments: tuple[Line, ...] = ()
    """Further arguments of srun's container plugin, or of `apptainer exec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """How jobs are submitted and what their nodes set up."""

    # ---- where from
    login: Line = ""
    """Login node, `[user@]host[:port]`, for launches from a machine outside of the cluster: SLURM's commands
    run there over SSH, and `storage.path` is a folder there. It needs `backend.python`."""
    # ---- where and how long
    partition: Line = ""
    """Partition; empty: the cluster's default."""
    account: Line = ""
    """Account that is charged."""
    qos: Line = ""
    """Quality of service."""
    reservation: Line = ""
    """Reservation to run in."""
    time: Duration | None = None
    """Time limit of one job, seconds (`24:00:00`, `2-12:00:00`); None: the partition's default."""
    constraint: Line = ""
    """Features that every node must have."""
    nodelist: Line = ""
    """Nodes that must be part of the job, e.g. `node[01-08]`."""
    exclude: Line = ""
    """Nodes that must not be part of the job."""
    switches: Line = ""
    """Most leaf switches, and how long to wait for them: `1@30:00`."""
    # ---- what each node gives
    exclusive: bool = True
    """Whether nodes are not shared with other jobs."""
    gres: Line = ""
    """Generic resources of each node, e.g. `gpu:h100:8`, or `none`.

    Default: `--gpus-per-node` with the profile's number; nothing for accelerator `cpu`.
    """
    cpus_per_task: PositiveInt | None = None
    """CPUs of each node (one task a node); None: all of an exclusive node."""
    mem: Line = "0"
    """Memory of each node, e.g. `480G`; 0: all of it."""
    hint: Line = ""
    """E.g. `nomultithread`."""
    wait_all_nodes: bool = True
    """Whether the script starts only when all nodes have booted."""
    # ---- names and notices
    job_name: Annotated[str, Pattern(r"[A-Za-z0-9._-]{0,120}", "letters, digits, `-`, `_`, `.`")] = ""
    """Default: the run id, which is what `squeue` then shows."""
    comment: Line = ""
    """Comment that accounting keeps."""
    wckey: Line = ""
    """Workload characterization key."""
    mail_type: Line = ""
    """Events that send mail, e.g. `END,FAIL`."""
    mail_user: Line = ""
    """Who gets it; default: the submitter."""
    # ---- the end of a job and what follows
    signal: Literal["USR1", "USR2", "HUP", "URG", "TERM"] = "USR1"
    """Signal that warns the batch script before the time limit."""
    signal_seconds: Annotated[int, Bounds(low=1, high=65535)] = 300
    """How long before the limit; Slurm may send it up to 60 s earlier. Must cover a step and a checkpoint."""
    requeue: bool = True
    """Whether a job that had to stop early is queued again, under the same id, to go on with its run."""
    requeue_limit: NaturalInt = 100
    """Most times that one job is started again (SLURM_RESTART_COUNT)."""
    chain: Literal["none", "singleton", "array"] = "none"
    """How further jobs of the same run wait for their turn.

    `singleton`: jobs of one name, one after the other; `array`: one array job, one task at a time.
    """
    chain_length: PositiveInt = 1
    """Jobs in the chain; those that are not needed are cancelled when the run has ended."""
    dependency: Line = ""
    """Other jobs to wait for, e.g. `afterok:1234`."""
    # ---- the environment
    export: Literal["all", "none"] = "all"
    """Whether the job starts with the submitting shell's whole environment.

    `none`: with PATH, HOME, the user's name, the language, and what `environment.pass_through` names.
    """
    modules: tuple[Line, ...] = ()
    """Modules to load, in order."""
    setup: tuple[Line, ...] = ()
    """Lines of shell that run before anything else, e.g. `source /opt/venv/bin/activate`."""
    container: ContainerConfig | None = None
    """Runs agents and ranks in a container. Without SLURM's commands in it, a run that loses its batch host
    has to be resumed by hand."""
    # ---- everything else
    extra: dict[str, Line] = field(default_factory=dict)
    """Further sbatch directives by name, e.g. `licenses: matlab`; an empty value makes a bare flag."""
    srun_args: tuple[Line, ...] = ()
    """Further arguments of the `srun` that starts an agent."""
    timeout: Annotated[float, Bounds(low=1, high=600)] = 30.0
    """Seconds that one call of sbatch, squeue, scontrol or sacct may take."""


def slurm_config(section: SlurmConfig | None) -> SlurmConfig:
    """The section, or its defaults where a profile has none."""
    return section if section is not None else SlurmConfig()


def python_of_ranks(section: SlurmConfig | None, python: str) -> str:
    """The interpreter that agents and ranks use: that of the container, where they run in one."""
    container = slurm_config(section).container
    return container.python if container is not None else python
