"""What must hold inside `backend.ssh`, and what goes with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.hosts import USER, expand_hosts
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.errors import Problem

_INTERFACE = re.compile(r"[A-Za-z0-9_.:-]{1,15}")


@rule("backend")
def _section_goes_with_its_kind(profile: ClusterProfile) -> Iterator[Problem]:
    backend = profile.backend
    if backend.ssh is not None and backend.kind != "ssh":
        message = f"backend.ssh means nothing with backend.kind = {backend.kind}"
        yield Problem("backend.ssh", message, "remove it, or set backend.kind to ssh")
    if backend.ssh is None and backend.kind == "ssh":
        hint = "e.g. `ssh: {hosts: ['node[01-04]']}`, or a hostfile"
        yield Problem("backend", "backend.kind = ssh needs nodes in backend.ssh", hint)


@rule("backend", "nodes")
def _nodes_are_named(profile: ClusterProfile) -> Iterator[Problem]:
    ssh = profile.backend.ssh
    if ssh is None:
        return
    if ssh.hosts and ssh.hostfile:
        message = "backend.ssh.hosts and backend.ssh.hostfile both name nodes"
        yield Problem("backend.ssh.hostfile", message, "keep one of them")
    elif not ssh.hosts and not ssh.hostfile:
        hint = "e.g. `hosts: ['node[01-04]']`, or a hostfile"
        yield Problem("backend.ssh.hosts", "backend.ssh names no nodes", hint)
    elif ssh.hosts:
        hosts, problems = expand_hosts(ssh.hosts, "backend.ssh.hosts")
        yield from (replace(problem, where="backend.ssh.hosts") for problem in problems)
        if not problems and len(hosts) < profile.nodes:
            message = f"nodes = {profile.nodes}, but backend.ssh.hosts names {len(hosts)}"
            yield Problem("backend.ssh.hosts", message, f"add hosts, or set nodes to {len(hosts)}")


@rule("backend.ssh.user")
def _login(profile: ClusterProfile) -> Iterator[Problem]:
    user = profile.backend.ssh.user if profile.backend.ssh else ""
    if user and not USER.fullmatch(user):
        hint = "letters, digits, `.`, `_` and `-`"
        yield Problem("backend.ssh.user", f"`{user}` is not a user name", hint)


@rule("backend.python")
def _python(profile: ClusterProfile) -> Iterator[Problem]:
    python = profile.backend.python
    if python and not python.startswith("/"):
        message = f"backend.python = `{python}` is not an absolute path"
        yield Problem(
            "backend.python", message, "e.g. `/shared/venv/bin/python`: nodes have a PATH of their own"
        )


@rule("inter_node.interface")
def _interface(profile: ClusterProfile) -> Iterator[Problem]:
    name = profile.inter_node.interface if profile.inter_node else ""
    if name and not _INTERFACE.fullmatch(name):
        message = f"`{name}` is not the name of a network interface"
        yield Problem("inter_node.interface", message, "e.g. `eth0`, `ib0`")


@rule("backend", "storage.shared")
def _unshared_needs_ssh(profile: ClusterProfile) -> Iterator[Problem]:
    if profile.storage.shared == "nodes" and profile.backend.kind != "ssh":
        message = f"storage.shared = nodes means nothing with backend.kind = {profile.backend.kind}"
        hint = "slurm: backend.slurm.login launches from outside; local: remove it"
        yield Problem("storage.shared", message, hint)
    ssh = profile.backend.ssh
    if ssh is not None and ssh.push and not profile.backend.python:
        hint = "e.g. `/opt/venv/bin/python`: an interpreter of the nodes that has torch"
        yield Problem("backend.python", "backend.ssh.push needs an interpreter on the nodes", hint)


@rule("inter_node")
def _switches(profile: ClusterProfile) -> Iterator[Problem]:
    switches = profile.inter_node.switches if profile.inter_node else {}
    first: dict[str, str] = {}
    for switch, entries in switches.items():
        place = f"inter_node.switches.{switch}"
        hosts, problems = expand_hosts(entries, place)
        yield from (replace(problem, where=place) for problem in problems)
        for host in hosts:
            other = first.setdefault(host.name, switch)
            if other != switch:
                message = f"`{host.name}` hangs on {other} already"
                yield Problem(place, message, "name the leaf switch of every node once")


SSH_RULES: tuple[Rule[ClusterProfile], ...] = (
    _section_goes_with_its_kind,
    _nodes_are_named,
    _login,
    _python,
    _interface,
    _switches,
    _unshared_needs_ssh,
)
