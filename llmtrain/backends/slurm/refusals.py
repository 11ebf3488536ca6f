"""Why SLURM refused something, in words that name the field to change."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmtrain.errors import ConfigError, ExitStatus, LlmtrainError, Problem, RunError
from llmtrain.transport.parallel import in_parallel

PLACE = "backend.slurm"


class SlurmError(RunError):
    """SLURM did not do what it was asked for."""


class SlurmUnreachableError(SlurmError):
    """The controller does not answer, or the commands of SLURM are not there; nothing is known of the job."""


class SlurmUnknownError(SlurmUnreachableError):
    """The commands found nobody who tells them of the cluster: on a login node without a configuration of its
    own while the controller is started again, elsewhere for good."""


class SlurmSlowError(SlurmUnreachableError):
    """A command was killed when its time was over; others may be quicker."""


class SlurmAbsentError(SlurmUnreachableError):
    """One command of SLURM is not there; others may be."""


class SlurmUnconfiguredError(SlurmError):
    """The commands of SLURM cannot read what tells them of the cluster; no further try changes that."""

    exit_status = ExitStatus.USAGE


class SlurmDiskAwayError(SlurmUnconfiguredError):
    """What tells of the cluster lies on a disk that does not answer: the commands of SLURM would hang."""

    exit_status = ExitStatus.FAILED


LOOK_SECONDS = 10.0
"""For a file system to say whether a file can be read."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One known answer."""

    pattern: str
    """Found in what the command wrote, whatever the case of its letters."""
    where: str
    """Field of the profile; empty when no field is to blame, so that a later try may work."""
    hint: str


REFUSALS: Sequence[Refusal] = (
    Refusal(
        r"invalid partition",
        f"{PLACE}.partition",
        "`sinfo -s` lists the partitions",
    ),
    Refusal(
        r"invalid account",
        f"{PLACE}.account",
        "`sacctmgr show associations user=$USER` lists your accounts",
    ),
    Refusal(
        r"invalid qos",
        f"{PLACE}.qos",
        "`sacctmgr show qos` lists them",
    ),
    Refusal(
        r"(requested )?reservation is invalid",
        f"{PLACE}.reservation",
        "`scontrol show reservation` lists them",
    ),
    Refusal(
        r"time limit is invalid|invalid --time",
        f"{PLACE}.time",
        "`sinfo -o '%R %l'` shows the limit of each partition",
    ),
    Refusal(
        r"invalid node name",
        f"{PLACE}.nodelist",
        "`sinfo -N` lists the nodes; backend.slurm.exclude names nodes too",
    ),
    Refusal(
        r"invalid feature|invalid constraint",
        f"{PLACE}.constraint",
        "`sinfo -o '%f'` lists the features",
    ),
    Refusal(
        r"memory specification can not be satisfied|invalid --mem",
        f"{PLACE}.mem",
        "`sinfo -o '%n %m'` shows the memory of each node, in MB",
    ),
    Refusal(
        r"invalid generic resource|gres",
        f"{PLACE}.gres",
        "`sinfo -o '%R %G'` lists them",
    ),
    Refusal(
        r"node count specification invalid|more processors requested|requested node configuration",
        "nodes",
        "no set of nodes has all that is asked for: `sinfo -o '%R %D %c %m %G'` shows nodes, CPUs, memory "
        "and accelerators of each partition",
    ),
    Refusal(
        r"invalid wckey",
        f"{PLACE}.wckey",
        "`sacctmgr show wckey` lists them",
    ),
    Refusal(
        r"invalid --mail-type",
        f"{PLACE}.mail_type",
        "e.g. BEGIN, END, FAIL, REQUEUE, TIME_LIMIT_80, joined by commas",
    ),
    Refusal(
        r"dependency problem|invalid job dependency|invalid dependency",
        f"{PLACE}.dependency",
        "e.g. `afterok:1234`; the job must be known to SLURM",
    ),
    Refusal(
        r"job array",
        f"{PLACE}.chain_length",
        "`scontrol show config | grep MaxArraySize` shows the largest array",
    ),
    Refusal(
        r"unrecognized option|invalid (option|--\w[\w-]*) specification|unknown option",
        f"{PLACE}.extra",
        "`sbatch --help` lists the options of this version",
    ),
    Refusal(
        r"no space left|disk quota exceeded",
        "",
        "the disk that holds the job's script is full",
    ),
    Refusal(
        r"violates accounting|qos\w*limit|assoc\w*limit|submit limit|quota",
        "",
        "you have as many jobs, nodes or hours as you may; when some have ended, submit again",
    ),
    Refusal(
        r"access/permission denied|user not found|not permitted to use",
        f"{PLACE}.account",
        "ask the administrators of the cluster for access",
    ),
    Refusal(
        r"partition \S* ?(is )?(down|inactive|drained)|required partition not available",
        f"{PLACE}.partition",
        "`sinfo -s` shows which are up",
    ),
    Refusal(
        r"munge",
        "",
        "the service that vouches for users is down: `systemctl status munged` on this machine",
    ),
)

_FRAME = re.compile(r"^(sbatch|squeue|scontrol|scancel|sacct|sinfo|srun): (error: )?")
_UNCONFIGURED = re.compile(
    r"unable to process configuration file|cannot stat file|(unable|failed) to (open|read|stat) .*\.conf",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"could not establish a configuration|dns srv lookup failed", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connection refused|socket timed out|communication connection failure"
    r"|slurm_persist|unable to resolve|zero bytes were transmitted|connect failure",
    re.IGNORECASE,
)

_NO_ANSWERS = (
    (" took longer than ", SlurmSlowError),
    ("` cannot be started: ", SlurmAbsentError),
    ("` is not there", SlurmAbsentError),
)
"""What transports say of commands."""


def refusal(command: str, stderr: str) -> LlmtrainError:
    """The error of a call that failed: ConfigError when a field is to blame, else SlurmError."""
    words = what_it_said(stderr)
    if _UNCONFIGURED.search(stderr):
        return _unconfigured(f"{command} cannot read SLURM's configuration: {words}")
    if _UNKNOWN.search(stderr):
        hint = (
            "is this a login node? There, /etc/slurm/slurm.conf or SLURM_CONF tells them, or slurmctld when "
            "it runs; try `scontrol ping`"
        )
        message = f"SLURM's commands know of no cluster here: {words}"
        return SlurmUnknownError(message, hint=hint, may_pass=True)
    if _UNREACHABLE.search(stderr):
        return SlurmUnreachableError(
            f"SLURM's controller does not answer: {words}",
            hint="`scontrol ping` shows whether it is up",
            may_pass=True,
        )
    for known in REFUSALS:
        if re.search(known.pattern, stderr, re.IGNORECASE):
            if known.where:
                return ConfigError([Problem(known.where, f"{command} refuses the job: {words}", known.hint)])
            return SlurmError(f"{command} refuses the job for now: {words}", hint=known.hint)
    return SlurmError(f"{command} failed: {words}")


def no_answer(said: str) -> SlurmError:
    """The error of a call that did not start, or was killed when its time was over; `said` tells of it."""
    if _UNCONFIGURED.search(said):
        return _unconfigured(said)
    hint = "is this a login node of the cluster? `scontrol ping` shows whether SLURM is up"
    kind = next((kind for words, kind in _NO_ANSWERS if words in said), SlurmUnreachableError)
    return kind(said, hint=hint)


def refuse_unreadable(named: str, seconds: float = LOOK_SECONDS) -> None:
    """Raise SlurmUnconfiguredError when the file that SLURM_CONF names cannot be read: SLURM's own commands
    would wait for a minute that it appears. Raises SlurmDiskAwayError when that is not known in time: a
    network file system whose server is gone keeps everybody waiting for ever."""
    where = "SLURM_CONF"
    try:
        _, late = in_parallel({where: partial(_open_once, Path(named))}, seconds=seconds)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        hint = "name the cluster's slurm.conf, or `unset SLURM_CONF`: usually it is /etc/slurm/slurm.conf"
        message = f"`{named}` cannot be read: {why}"
        raise SlurmUnconfiguredError(message, where=where, hint=hint) from error
    if late:
        message = f"`{named}` cannot be read: its file system has not answered for {seconds:g} s"
        hint = f"is its server up? `df {shlex.quote(str(Path(named).parent))}` hangs as long as it is not"
        raise SlurmDiskAwayError(message, where=where, hint=hint)


def _open_once(file: Path) -> None:
    # Opening a pipe, or some devices, waits for somebody at the other end.
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError("it is no regular file")
    with file.open("rb"):
        return


def _unconfigured(message: str) -> SlurmUnconfiguredError:
    hint = "the variable SLURM_CONF names the file, else it is /etc/slurm/slurm.conf"
    return SlurmUnconfiguredError(message, hint=hint)


def what_it_said(stderr: str) -> str:
    """The command's own words on one line, without the frame around them."""
    lines = []
    for line in stderr.splitlines():
        words = _FRAME.sub("", line.strip()).removeprefix("Batch job submission failed: ")
        if words and not words.startswith("Try "):
            lines.append(words.rstrip("."))
    return "; ".join(dict.fromkeys(lines)) or "it said nothing"
