"""The hosts that a profile names, in it or in a hostfile."""

from __future__ import annotations

from pathlib import Path

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.hosts import Host, expand_hosts, read_hostfile
from llmtrain.config.ssh import USER_CONFIG, SshConfig
from llmtrain.errors import ConfigError, Problem


def named_hosts(cluster: ClusterProfile) -> list[Host]:
    """Hosts of the profile or of its hostfile. Raises ConfigError, also when the file that says how to reach
    them is not there."""
    ssh = cluster.backend.ssh or SshConfig()
    _refuse_missing(ssh)
    if not ssh.hostfile:
        hosts, problems = expand_hosts(ssh.hosts, "backend.ssh.hosts")
    else:
        try:
            text = Path(ssh.hostfile).expanduser().read_text(encoding="utf-8")
        except (OSError, RuntimeError, ValueError) as error:
            message = f"the hostfile cannot be read: {getattr(error, 'strerror', None) or error}"
            raise ConfigError([Problem(ssh.hostfile, message, "backend.ssh.hostfile names it")]) from error
        hosts, problems = read_hostfile(text, ssh.hostfile)
    if not problems and len(hosts) < cluster.nodes:
        message = f"nodes = {cluster.nodes}, but {len(hosts)} are named"
        problems = [Problem(ssh.hostfile or "backend.ssh.hosts", message, f"set nodes to {len(hosts)}")]
    for host in hosts:
        if host.slots is not None and host.slots != cluster.gpus_per_node:
            message = f"`{host.name}` has slots={host.slots}, but gpus_per_node is {cluster.gpus_per_node}"
            problems.append(Problem(host.where, message, "all nodes run the same number of ranks"))
    if problems:
        raise ConfigError(problems)
    return hosts


def _refuse_missing(ssh: SshConfig) -> None:
    """Raise ConfigError for files that the profile names and that are not there."""
    problems = []
    if ssh.config_file != USER_CONFIG and (why := _why_missing(ssh.config_file)):
        hint = f"name one that `ssh -F` takes, or remove it: then {USER_CONFIG} holds"
        problems.append(Problem("backend.ssh.config_file", why, hint))
    # Of a key that only an agent holds there is the public half.
    if ssh.identity_file and (why := _why_missing(ssh.identity_file, ".pub")):
        hint = "name a private key, or remove it: then the agent's keys and those of ~/.ssh/config are tried"
        problems.append(Problem("backend.ssh.identity_file", why, hint))
    if problems:
        raise ConfigError(problems)


def _why_missing(named: str, ending: str = "") -> str:
    """Why there is no file of that name, with or without the ending; empty when there is one."""
    try:
        path = Path(named).expanduser()
        if path.is_file() or Path(f"{path}{ending}").is_file():
            return ""
        return f"there is no file {named}"
    except (OSError, RuntimeError, ValueError) as error:  # Of these, RuntimeError: nobody's `~`.
        return f"{named} cannot be read: {getattr(error, 'strerror', None) or error}"
