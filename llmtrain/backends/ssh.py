"""A list of hosts and no scheduler: the supervisor stays on the launching machine, one SSH channel a node."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmtrain import __version__
from llmtrain.backends.base import JobHandle, JobStatus, Node
from llmtrain.backends.local import cancel_supervisor, poll_supervisor, start_supervisor
from llmtrain.backends.preflight import (
    Expected,
    PreflightError,
    Report,
    address_of,
    gpus_promised,
)
from llmtrain.backends.ssh_hosts import named_hosts
from llmtrain.backends.survey import REPORT_SECONDS, SOCKET_VARIABLES, Survey, ask, judged, nonce_file
from llmtrain.backends.switches import profile_switches, with_switches
from llmtrain.config.cluster import ClusterProfile
from llmtrain.config.job import JobSpec
from llmtrain.config.ssh import SshConfig
from llmtrain.errors import Problem, RunError
from llmtrain.run.job_file import JobFile
from llmtrain.run.layout import RunDir
from llmtrain.transport.base import Transport, TransportError
from llmtrain.transport.code import send_code, wrapper_path
from llmtrain.transport.parallel import in_parallel
from llmtrain.transport.ssh import SshTransport
from llmtrain.transport.ssh_settings import OpenSshConfig

CLEAN_SECONDS = 10.0
RETRY_SECONDS = 10.0
"""Pauses between tries to connect, in all."""
_log = logging.getLogger(__name__)


class SshBackend:
    """Runs on hosts that can be reached by `ssh NAME`. Raises ConfigError for a bad hostfile."""

    def __init__(self, cluster: ClusterProfile) -> None:
        self._cluster = cluster
        self._ssh = cluster.backend.ssh or SshConfig()
        self._hosts = {host.name: host for host in named_hosts(cluster)[: cluster.nodes]}
        self._config = OpenSshConfig(self._ssh)
        self._warm: dict[str, SshTransport] = {}
        """Connections that looking at the nodes has left open; handed out once."""
        self._fit: dict[str, Report] = {}
        """Nodes that were fit when all were looked at."""

    # ---- where the user types
    def check(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Problem]:
        """Connect to all nodes and compare what they have. Raises PreflightError when too few are fit."""
        folder = run.path.parent
        is_new = not run.job_json.exists()
        absent = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
        try:
            self._fit_nodes(spec, folder, fewest, is_new=is_new)
        except RunError:
            # The file that proves the shared folder has made it; what is refused leaves nothing behind.
            for each in absent:
                with suppress(OSError):
                    each.rmdir()
            raise
        finally:
            self._cool_down()
        return ()

    def submit(self, run: RunDir, job: JobFile) -> JobHandle:
        """Start the supervisor on this machine, in a session of its own."""
        return start_supervisor(run, backend="ssh")

    def poll(self, handle: JobHandle) -> JobStatus:
        """Whether the supervisor process runs; how it ended is in the run's record."""
        return poll_supervisor(handle)

    def cancel(self, handle: JobHandle) -> None:
        """SIGTERM to the supervisor."""
        cancel_supervisor(handle)

    # ---- in the supervisor
    def nodes(self, spec: JobSpec, run: RunDir, *, fewest: int | None = None) -> Sequence[Node]:
        """Nodes that are fit, in the order of the list. Raises PreflightError when they are too few."""
        return self.as_nodes(self._fit_nodes(spec, run.path, fewest))

    def look_at(self, names: Sequence[str], spec: JobSpec, run: RunDir, *, seconds: float) -> Sequence[Node]:
        """Those of the named hosts that are fit now, asked all at once."""
        return self.as_nodes(self._look_again(names, run, seconds).fit)

    def preflight(self, names: Sequence[str], run: RunDir, *, seconds: float) -> Mapping[str, str]:
        """What is wrong with those of the named hosts that answer; connections are kept for the agents."""
        look = self._look_again(names, run, seconds)
        return {
            name: found[0].message
            for name, found in look.problems.items()
            if name in look.reports and name in names
        }

    def _look_again(self, names: Sequence[str], run: RunDir, seconds: float) -> Survey:
        hosts = [name for name in names if name in self._hosts]
        # Held against those that are in use: a node may come back with another installation.
        return self._look(run.path, hosts, seconds=seconds, beside=self._fit)

    def survey(self, folder: Path, *, write: bool = False) -> Survey:
        """All hosts of the profile."""
        return self._look(folder, list(self._hosts), seconds=self._patience, write=write)

    def transport(self, node: Node) -> Transport:
        """A connection to the node."""
        warm = self._warm.pop(node.name, None)
        return warm if warm is not None else self._transport(node.name)

    def agent_python(self, node: Node) -> str:
        """The profile's interpreter, by default the path of this one; or what finds the code sent there."""
        if self._ssh.push:
            return str(wrapper_path(self._storage, self._cluster.backend.python))
        return self._cluster.backend.python or sys.executable

    @property
    def is_distant(self) -> bool:
        """Whether nodes do not see the run's folder of this machine."""
        return self._cluster.storage.shared == "nodes"

    def as_nodes(self, reports: Mapping[str, Report]) -> list[Node]:
        """Nodes by the address that the others reach them on."""
        nodes = []
        for name, report in reports.items():
            address, device = address_of(report, self._interface)
            environment = dict.fromkeys(SOCKET_VARIABLES, device) if device else {}
            nodes.append(Node(name=name, address=address, environment=environment, gpus=report.gpu_uuids))
        return with_switches(nodes, profile_switches(self._cluster))

    # ---- looking at the nodes
    @property
    def _interface(self) -> str:
        return self._cluster.inter_node.interface if self._cluster.inter_node else ""

    def _transport(self, name: str) -> SshTransport:
        return SshTransport(self._hosts[name], self._config)

    def _fit_nodes(
        self, spec: JobSpec, folder: Path, fewest: int | None, *, is_new: bool = False
    ) -> dict[str, Report]:
        """Reports of the nodes that are fit; the others are named in the log while enough are left."""
        needed = spec.cluster.nodes - spec.cluster.spares if fewest is None else fewest
        survey = self._look(folder, list(self._hosts), seconds=self._patience, several=needed > 1)
        fit = survey.fit
        if len(fit) < needed:
            self._cool_down()
            summary = _summary(len(fit), needed, len(self._hosts), can_resume=not is_new)
            raise PreflightError([*survey.all_problems, *summary])
        for problem in survey.all_problems:
            _log.warning("left out: %s", problem.text())
        self._fit = fit
        return fit

    @property
    def _patience(self) -> float:
        return self._ssh.connect_timeout + RETRY_SECONDS + REPORT_SECONDS

    def _look(
        self,
        folder: Path,
        names: Sequence[str],
        *,
        seconds: float,
        several: bool = True,
        beside: Mapping[str, Report] | None = None,
        write: bool = False,
    ) -> Survey:
        """The named hosts, held against each other and those `beside` them."""
        proof = nonce_file(folder) if not self.is_distant else self._nonce_there(folder, names)
        with proof as (file, nonce):
            work = {name: partial(self._look_at, name, file, write) for name in names}
            reports, failed = in_parallel(work, seconds=seconds)
        expected = Expected(
            llmtrain=__version__,
            folder=str(folder),
            nonce=nonce,
            interface=self._interface,
            several=several,
            gpus=gpus_promised(self._cluster),
            distant=self.is_distant,
        )
        known = {name: replace(report, nonce=nonce) for name, report in (beside or {}).items()}
        return judged(names, known | reports, failed, expected)

    def _look_at(self, name: str, nonce: Path, write: bool) -> Report:
        transport = self._transport(name)
        try:
            transport.connect()
            if self._ssh.push:
                send_code(transport, self._storage, self._cluster.backend.python)
            report = ask(transport, name, self.agent_python(Node(name=name, address="")), nonce, write=write)
        except BaseException:
            transport.close()
            raise
        if (older := self._warm.pop(name, None)) is not None:
            older.close()
        self._warm[name] = transport
        return report

    @contextmanager
    def _nonce_there(self, folder: Path, names: Sequence[str]) -> Iterator[tuple[Path, str]]:
        """A file on the first node that answers proves that the others see the same folder."""
        text = os.urandom(16).hex()
        file = folder / f".llmtrain-{text[:8]}"
        for name in names:
            transport = self._transport(name)
            try:
                transport.connect()
                transport.put(file, text.encode("ascii"))
            except TransportError:
                transport.close()
                continue
            try:
                yield file, text
            finally:
                with suppress(TransportError):
                    transport.run(["rm", "-f", "--", str(file)], timeout=CLEAN_SECONDS)
                transport.close()
            return
        yield file, text

    @property
    def _storage(self) -> Path:
        return Path(self._cluster.storage.path)

    def _cool_down(self) -> None:
        while self._warm:
            self._warm.popitem()[1].close()


def _summary(fit: int, needed: int, named: int, *, can_resume: bool) -> list[Problem]:
    hint = f"mend them, or let the run go on with fewer: `llmtrain resume RUN --nodes {fit}`"
    message = f"{fit} of {named} nodes are fit to start, {needed} are needed"
    return [Problem("", message, hint if can_resume and fit else "")]
