"""The nodes of a running job: what SLURM says of them, and what they say of themselves."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmtrain import __version__
from llmtrain.backends.base import Node
from llmtrain.backends.preflight import Expected, PreflightError, Report, address_of
from llmtrain.backends.slurm.calls import NodeRow, SlurmCalls
from llmtrain.backends.slurm.refusals import SlurmError
from llmtrain.backends.survey import REPORT_SECONDS, SOCKET_VARIABLES, Survey, ask, judged, nonce_file
from llmtrain.errors import Problem
from llmtrain.transport.base import Transport
from llmtrain.transport.parallel import in_parallel

LOOPBACK = "127."

_log = logging.getLogger(__name__)


def survey_nodes(
    node_list: str,
    calls: SlurmCalls,
    *,
    folder: Path,
    python: str,
    transport: Callable[[str], Transport],
    interface: str = "",
    gpus: int = 0,
    write: bool = False,
) -> Survey:
    """Nodes of a list, in SLURM's order, which is near the network's.

    Every node that SLURM hears of is asked over a step of its own, all at once.
    """
    names = calls.hostnames(node_list)
    rows = calls.nodes(node_list)
    silent = _silent(names, rows)
    heard = [name for name in names if name not in silent]
    with nonce_file(folder) as (file, nonce):
        work = {name: partial(ask, transport(name), name, python, file, write=write) for name in heard}
        reports, failed = in_parallel(work, seconds=REPORT_SECONDS + 10)
    expected = Expected(
        llmtrain=__version__,
        folder=str(folder),
        nonce=nonce,
        interface=interface,
        several=len(names) > 1,
        gpus=gpus,
    )
    placed = {
        name: replace(report, entered_by=_address(report, rows.get(name), name))
        for name, report in reports.items()
    }
    return judged(names, placed, {**silent, **failed}, expected)


def _silent(names: Sequence[str], rows: Mapping[str, NodeRow]) -> dict[str, SlurmError]:
    """Nodes that SLURM does not hear of, and what it says of them."""
    return {
        name: SlurmError(f"SLURM says {rows[name].state}", where=name, hint=f"`scontrol show node {name}`")
        for name in names
        if name in rows and not rows[name].is_well
    }


def fit_nodes(survey: Survey, *, needed: int = 1, interface: str = "") -> tuple[Node, ...]:
    """Those that are fit; the others are left out and named in the log. Raises PreflightError when fewer than
    `needed` are fit."""
    fit = survey.fit
    if len(fit) < needed:
        message = f"{len(fit)} of the job's {len(survey.names)} nodes are fit to start, {needed} are needed"
        raise PreflightError([*survey.all_problems, Problem("", message)])
    for problem in survey.all_problems:
        _log.warning("left out: %s", problem.text())
    return as_nodes(fit, interface)


def as_nodes(reports: Mapping[str, Report], interface: str) -> tuple[Node, ...]:
    """The nodes of some reports."""
    return tuple(_node(name, report, interface) for name, report in reports.items())


def _node(name: str, report: Report, interface: str) -> Node:
    address, device = address_of(report, interface)
    return Node(
        name=name,
        address=address or name,
        environment=dict.fromkeys(SOCKET_VARIABLES, device) if device else {},
        gpus=report.gpu_uuids,
    )


def _address(report: Report, row: NodeRow | None, name: str) -> str:
    """Where the others reach a node: the address that SLURM's name for it means, if the node has it, since a
    node's own name often means its loopback device; else the first address that it has."""
    meant = _resolved([row.address if row is not None else name, name])
    own = [address for address in report.addresses.values() if not address.startswith(LOOPBACK)]
    for address in meant:
        if address in own:
            return address
    outside = [address for address in meant if not address.startswith(LOOPBACK)]
    return next(iter([*outside, *own, *report.addresses.values()]), "")


def _resolved(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in dict.fromkeys(names):
        try:
            entries = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        found += [str(entry[4][0]) for entry in entries]
    return found
