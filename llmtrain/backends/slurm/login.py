"""A login node that is reached over SSH: SLURM's commands run there, and the run's folder lies there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from llmtrain import __version__
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.hosts import expand_entry
from llmtrain.config.slurm import slurm_config
from llmtrain.config.ssh import SshConfig
from llmtrain.errors import ConfigError, Problem, RunError
from llmtrain.run.layout import RunDir
from llmtrain.run.remote import Remote
from llmtrain.transport.base import Completed, Transport, TransportError

AT_LOGIN = "LLMTRAIN_AT_LOGIN"
"""Set for commands that were forwarded, so that the login node does not forward them to itself."""
FORWARD_SECONDS = 300.0


def is_elsewhere(cluster: ClusterProfile, environment: Mapping[str, str] | None = None) -> bool:
    """Whether this is neither the profile's login node nor a node of one of its jobs."""
    login = slurm_config(cluster.backend.slurm).login
    known = os.environ if environment is None else environment
    if cluster.backend.kind != "slurm" or not login or AT_LOGIN in known or "SLURM_JOB_ID" in known:
        return False
    name = login.rpartition("@")[2].partition(":")[0].partition(".")[0]
    return socket.gethostname().partition(".")[0] != name


def folder_there(cluster: ClusterProfile, run: RunDir) -> RunDir:
    """The folder of a run on the login node."""
    return RunDir(Path(cluster.storage.path) / run.run_id)


def remote_of(cluster: ClusterProfile, run: RunDir) -> Remote:
    """What `remote.json` of a run says."""
    return Remote(
        login=slurm_config(cluster.backend.slurm).login,
        path=str(folder_there(cluster, run).path),
        python=cluster.backend.python,
    )


def way_to(login: str) -> Transport:
    """The way to a login node. Raises ConfigError for a name that is none."""
    from llmtrain.transport.ssh import SshTransport
    from llmtrain.transport.ssh_settings import OpenSshConfig

    hosts, problems = expand_entry(login, "backend.slurm.login")
    if problems or len(hosts) != 1:
        raise ConfigError(problems or [Problem("backend.slurm.login", f"`{login}` is not one host")])
    return SshTransport(hosts[0], OpenSshConfig(SshConfig()))


def problems_there(way: Transport, login: str, python: str, run: RunDir) -> list[Problem]:
    """What keeps a job from being submitted there. Raises TransportError when it cannot be reached."""
    try:
        way.run(["sbatch", "--version"], timeout=30.0)
    except TransportError as error:
        if "is not there" not in str(error):
            raise
        hint = "name a login node of the cluster whose PATH has SLURM's commands also without a terminal"
        return [Problem("backend.slurm.login", f"there is no `sbatch` on {login}", hint)]
    done = way.run([python, "-c", "import llmtrain; print(llmtrain.__version__)"], timeout=60.0)
    found = done.stdout.decode("utf-8", "replace").strip()
    if done.exit_code or found != __version__:
        what = f"llmtrain {found}" if not done.exit_code else "no llmtrain"
        hint = f"`{python} -m pip install llmtrain=={__version__}` on {login}"
        return [Problem("backend.python", f"{python} on {login} has {what}, here it is {__version__}", hint)]
    folder = run.path.parent
    if way.run(["test", "-e", str(run.job_json)], timeout=30.0).exit_code == 0:
        message = f"there is a run in {run.path} on {login} already"
        return [Problem("", message, "choose another --run-dir: its name is the run's, also there")]
    done = way.run(["mkdir", "-p", "--", str(folder)], timeout=30.0)
    if done.exit_code:
        said = done.stderr.decode("utf-8", "replace").strip()
        return [
            Problem("storage.path", f"{folder} cannot be made on {login}: {said}", "another storage.path")
        ]
    return []


def push(way: Transport, here: RunDir, there: RunDir) -> None:
    """Bring the files of a run that has not started to the login node. Raises TransportError."""
    files = [path for path in sorted(here.path.rglob("*")) if path.is_file() and path != here.remote_json]
    files.sort(key=lambda path: path.name == "job.json")  # A folder with it is a run.
    for file in files:
        mode = 0o755 if file.suffix == ".sh" else 0o644
        way.put(there.path / file.relative_to(here.path), file.read_bytes(), mode=mode)


def forward(remote: Remote, arguments: Sequence[str]) -> Completed:
    """Run an `llmtrain` command on the login node. Raises LlmtrainError."""
    way = way_to(remote.login)
    command = ["env", f"{AT_LOGIN}=1", remote.python, "-m", "llmtrain", *arguments]
    run = partial(way.run, timeout=FORWARD_SECONDS)
    try:
        return run(command)
    except TransportError as error:
        raise RunError(f"the run lives on {remote.login}: {error}", hint=error.problems[0].hint) from error
    finally:
        way.close()
